// How a script says what its client can do: protocol.py, for Node.

const { CLIENTS_URL, CLIENTS_MODEL, CLIENTS_TIMEOUT_S } = process.env;
const IDLE_TIMEOUT_S = 10;

export const URL = CLIENTS_URL;
export const BASE_URL = `${URL}/v1`;
export const MODEL = CLIENTS_MODEL;
export const KEY = "none";

// The parameters of a tool, and an answer's schema: its strings end, whoever writes them.
export const WEATHER = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};

export function check(holds, otherwise) {
  if (!holds) throw new Error(otherwise);
}

export function checkCity(args) {
  const found = typeof args === "string" ? JSON.parse(args) : args;
  check(["Paris", "Rome"].includes(found.city), `not valid: ${JSON.stringify(args)}`);
}

// The server soon runs no request: whoever went away has been noticed.
export async function checkIdle() {
  const deadline = Date.now() + 1000 * IDLE_TIMEOUT_S;
  for (let running = await countRunning(); running > 0; running = await countRunning()) {
    check(Date.now() < deadline, `${running} requests run on after their client left`);
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
}

// Try each capability, a function by its name, and say how it went. What it returns is a figure.
export async function run(functions) {
  say({ tries: Object.keys(functions) });
  for (const [capability, attempt] of Object.entries(functions)) {
    try {
      const message = (await Promise.race([attempt(), timeout()])) ?? "";
      say({ capability, status: "ok", message });
    } catch (error) {
      say({ capability, status: "failed", message: `${error.name}: ${error.message}` });
    }
  }
  process.exit(0);
}

function timeout() {
  const after = (_, reject) =>
    setTimeout(() => reject(new Error(`not done after ${CLIENTS_TIMEOUT_S} s`)), 1000 * CLIENTS_TIMEOUT_S);
  return new Promise(after);
}

async function countRunning() {
  const lines = (await (await fetch(`${URL}/metrics`)).text()).split("\n");
  const samples = lines.filter((line) => line.includes(":num_requests_running") && line[0] !== "#");
  return samples.reduce((sum, line) => sum + Number(line.slice(line.lastIndexOf(" "))), 0);
}

function say(line) {
  console.log(JSON.stringify(line));
}
