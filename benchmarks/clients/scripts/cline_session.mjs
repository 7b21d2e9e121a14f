// Goes on with a session of Cline's by the Agent Client Protocol, as editors do: its own command
// line opens stored sessions in a terminal alone.
//
//     node cline_session.mjs CLINE SESSION_ID PROMPT

import { spawn } from "node:child_process";
import { createInterface } from "node:readline";

const [cline, sessionId, prompt] = process.argv.slice(2);
const child = spawn(process.execPath, [cline, "--acp", "--auto-approve", "true"], {
  stdio: ["pipe", "pipe", "inherit"],
});
const waiting = new Map(); // key the id of a request, value what settles its promise
let isAsked = false; // a loaded session's history is told, too

createInterface({ input: child.stdout }).on("line", (line) => {
  const message = JSON.parse(line);
  if (message.method === "session/update") show(message.params.update);
  else if (message.method) allow(message);
  else if (message.error) waiting.get(message.id).reject(new Error(JSON.stringify(message.error)));
  else waiting.get(message.id).resolve(message.result);
});

function show(update) {
  if (!isAsked || update.sessionUpdate !== "agent_message_chunk") return;
  process.stdout.write(update.content.text ?? "");
}

function allow({ id, params }) {
  const option = params.options?.find(({ kind }) => kind.startsWith("allow"));
  send({ id, result: { outcome: { outcome: "selected", optionId: option?.optionId } } });
}

function send(message) {
  child.stdin.write(`${JSON.stringify({ jsonrpc: "2.0", ...message })}\n`);
}

function ask(method, params) {
  const id = waiting.size;
  const answer = new Promise((resolve, reject) => waiting.set(id, { resolve, reject }));
  send({ id, method, params });
  return answer;
}

await ask("initialize", { protocolVersion: 1, clientCapabilities: {} });
await ask("session/load", { sessionId, cwd: process.cwd(), mcpServers: [] });
await ask("session/set_model", { sessionId, modelId: process.env.CLIENTS_MODEL });
isAsked = true;
await ask("session/prompt", { sessionId, prompt: [{ type: "text", text: prompt }] });
child.kill();
process.exit(0);
