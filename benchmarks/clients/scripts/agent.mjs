// What a coding agent is asked to do. It runs as its users run it; only what the model says is held
// to a form, by a proxy between the two, because a small model says nothing that is of use.

import { spawn } from "node:child_process";
import http from "node:http";
import { check, run, URL } from "./protocol.mjs";

const SAID = "The model has spoken.";
export const COMMAND = "echo legato-$((6 * 7))";
const PRINTED = "legato-42"; // in the command's output alone
const OUTPUT_CHARS = 600;

// Tries a program.
//
//   program: the command and its first arguments.
//   prepare(baseUrl): writes the program's settings; may return arguments of a command that does.
//   ask(prompt, baseUrl): arguments for a new session. again(prompt, baseUrl): for the last one.
//   shell: the tool that runs commands, and call(command), its arguments.
//   edit: for a program without tools, the words after which it runs `COMMAND`.
//   printed: how often the command's output is in the model's prompt: once the command has run,
//     when the session goes on, and once it has run again.
//   environment: variables that it needs.
//   isAnthropic: whether it speaks Anthropic's API.
export async function tryAgent({
  program, prepare = () => undefined, ask, again, shell, call = () => ({}), edit, printed = [1, 1, 2],
  environment = () => ({}), isAnthropic = false,
}) {
  const proxy = await Proxy.start({ shell, args: call(COMMAND), edit, isAnthropic });

  async function tell(args) {
    const [command, ...first] = program;
    const env = { ...process.env, HOME: process.cwd(), ...environment(proxy.url) };
    const { code, output } = await ended(spawn(command, [...first, ...args], { env, stdio: ["ignore", "pipe", "pipe"] }));
    check(code === 0, `it ended with ${code}: ${output.slice(-OUTPUT_CHARS)}`);
    return output;
  }

  async function chat() {
    const preparing = prepare(proxy.url);
    if (preparing) await tell(preparing);
    check((await tell(ask("Say hi.", proxy.url))).includes(SAID), "it does not show the answer");
  }

  async function tool() {
    await loop(ask("Run the command.", proxy.url), printed[0]);
  }

  async function session() {
    await loop(again("Run it again.", proxy.url), printed[2]);
    const [, second] = proxy.calling;
    check(second.numAnswers > 0, "the session's earlier turn is gone");
    check(second.numResults === printed[1], "the command's output is not what was stored");
    check(second.usage.cached > 0, "nothing of the earlier turn was cached");
  }

  async function secondTurn() {
    const [first, second] = proxy.calling;
    const { cached, prompt } = second.usage;
    return `${seconds(second)}, with ${cached} of ${prompt} tokens cached; the first ${seconds(first)}`;
  }

  // The model calls the shell, reads what the command printed, and speaks.
  async function loop(args, numResults) {
    proxy.numCalls = 1;
    proxy.speaking = [];
    const output = await tell(args);
    check(proxy.numCalls === 0, "it offered no tool");
    const found = proxy.speaking.map((turn) => turn.numResults);
    const heard = proxy.speaking.at(-1)?.heard;
    check(found.includes(numResults), `prompts have the output ${found} times, not ${numResults}: ${heard}`);
    check(output.includes(SAID), "it does not show the answer to the output");
  }

  await run({ chat, "tool loop": tool, session, "second turn": secondTurn });
}

// Forwards requests to the server, and holds the model's answers to a form.
//
//   numCalls: how often the model is still to call the shell; else it speaks.
//   calling: the turns in which it did. speaking: those of the latest question in which it spoke.
class Proxy {
  static async start(told) {
    const proxy = new Proxy(told);
    const server = http.createServer((request, response) => proxy.#forward(request, response));
    await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
    proxy.url = `http://127.0.0.1:${server.address().port}/v1`;
    return proxy;
  }

  constructor({ shell, args, edit, isAnthropic }) {
    this.isAnthropic = isAnthropic;
    this.numCalls = 0;
    this.calling = [];
    this.speaking = [];
    this.shell = shell;
    this.args = args;
    this.edit = edit;
  }

  async #forward(request, response) {
    let body = await text(request);
    let turn;
    if (request.method === "POST" && /\/(responses|completions|messages)(\?|$)/.test(request.url)) {
      const asked = JSON.parse(body);
      turn = { numResults: count(body, PRINTED), numAnswers: count(body, SAID) };
      turn.heard = JSON.stringify((asked.messages ?? asked.input ?? []).at(-1) ?? "").slice(0, OUTPUT_CHARS);
      this.#hold(asked, turn);
      body = JSON.stringify(asked);
    }
    const headers = { ...request.headers, "content-length": Buffer.byteLength(body) };
    delete headers["transfer-encoding"];
    const options = { method: request.method, headers };
    const started = performance.now();
    const forwarded = http.request(URL + request.url, options, (answer) => {
      let told = "";
      response.writeHead(answer.statusCode, answer.headers);
      answer.on("data", (piece) => {
        if (turn && !turn.firstMs) turn.firstMs = performance.now() - started;
        told += piece;
        response.write(piece);
      });
      answer.on("end", () => {
        if (turn && answer.statusCode === 200) turn.usage = usage(told);
        if (answer.statusCode >= 400) console.error(request.url, told);
        response.end();
      });
    });
    forwarded.on("error", () => response.destroy());
    response.on("close", () => forwarded.destroy());
    forwarded.end(body);
  }

  #hold(asked, turn) {
    const tool = asked.tools?.find((tool) => (tool.function ?? tool).name === this.shell);
    const canCall = tool || this.edit; // else it asks for a title, or the like
    if (canCall && this.numCalls > 0) {
      this.numCalls -= 1;
      this.calling.push(turn);
      if (this.edit) {
        asked.structured_outputs = { choice: [this.edit] };
        if (asked.stream) asked.stream_options ??= { include_usage: true };
        return;
      }
      if (this.isAnthropic) {
        tool.input_schema = constants(this.args);
        asked.tool_choice = { type: "tool", name: this.shell, disable_parallel_tool_use: true };
        return;
      }
      (tool.function ?? tool).parameters = constants(this.args);
      const name = { name: this.shell };
      asked.tool_choice = { type: "function", ...(tool.function ? { function: name } : name) };
      asked.parallel_tool_calls = false;
      return;
    }
    if (canCall) this.speaking.push(turn);
    const schema = { name: "said", schema: { type: "string", enum: [SAID] } };
    if (this.isAnthropic) {
      if (asked.tools) asked.tool_choice = { type: "none" };
      const format = { type: "json_schema", schema: schema.schema };
      asked.output_config = { ...asked.output_config, format };
      return;
    }
    if (asked.tools) asked.tool_choice = "none";
    if (asked.input) asked.text = { ...asked.text, format: { type: "json_schema", ...schema } };
    else asked.response_format = { type: "json_schema", json_schema: schema };
  }
}

function count(text, words) {
  return text.split(words).length - 1;
}

function constants(args) {
  const properties = Object.entries(args).map(([name, value]) => [name, { enum: [value] }]);
  return {
    type: "object",
    properties: Object.fromEntries(properties),
    required: Object.keys(args),
    additionalProperties: false,
  };
}

function usage(told) {
  const last = (pattern) => Number([...told.matchAll(pattern)].at(-1)?.[1] ?? 0);
  const read = last(/"cache_read_input_tokens":(\d+)/g); // Anthropic's prompt tokens leave these out
  const prompt = last(/"(?:input|prompt)_tokens":(\d+)/g) + read;
  return { prompt, cached: last(/"cached_tokens":(\d+)/g) + read };
}

function seconds(turn) {
  return `${(turn.firstMs / 1000).toFixed(2)} s`;
}

async function text(stream) {
  const pieces = [];
  for await (const piece of stream) pieces.push(piece);
  return Buffer.concat(pieces).toString();
}

function ended(child) {
  return new Promise((resolve, reject) => {
    let output = "";
    child.stdout.on("data", (piece) => (output += piece));
    child.stderr.on("data", (piece) => (output += piece));
    child.on("error", reject);
    child.on("close", (code) => resolve({ code, output }));
  });
}
