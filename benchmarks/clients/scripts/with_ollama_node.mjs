// Ollama's own client for Node.

import { Ollama } from "ollama";
import { MODEL, URL, WEATHER, check, checkCity, checkIdle, run } from "./protocol.mjs";

const client = new Ollama({ host: URL });
const QUESTION = [{ role: "user", content: "What is the weather in Paris?" }];
const GREEDY = { num_predict: 48, temperature: 0 };
const TOOL = {
  type: "function",
  function: { name: "get_weather", description: "Weather now", parameters: WEATHER },
};

const ask = (request) =>
  client.chat({ model: MODEL, messages: QUESTION, options: GREEDY, ...request });

async function chat() {
  const { models } = await client.list();
  const shown = await client.show({ model: models[0].model });
  check(shown.capabilities.includes("tools"), JSON.stringify(shown));
  check((await client.ps()).models.length === 1, "not one model");
  check((await client.pull({ model: MODEL })).status === "success", "the model is not present");
  check((await ask({})).message.content, "there is no text");
  const prompt = { model: MODEL, prompt: "Once upon", options: GREEDY };
  check((await client.generate(prompt)).response, "there is no text");
  const { embeddings } = await client.embed({ model: MODEL, input: ["Hello", "Hi"] });
  check(embeddings.length === 2, "not two vectors");
}

async function stream() {
  const pieces = [];
  for await (const piece of await ask({ stream: true })) pieces.push(piece.message.content);
  check(pieces.length > 2, "the text came in one piece");
  check(pieces.join("") === (await ask({})).message.content, `${pieces} are not the text`);
}

async function history() {
  const system = { role: "system", content: "Be brief." };
  const { message } = await ask({ messages: [system, ...QUESTION] });
  check((await ask({ messages: [system, ...QUESTION, message, ...QUESTION] })).done, "not done");
}

async function usage() {
  const whole = await ask({});
  let last;
  for await (const piece of await ask({ stream: true })) last = piece;
  check(last.eval_count === whole.eval_count && last.eval_count > 0, JSON.stringify(last));
  check(last.eval_duration > 0 && last.total_duration > 0, JSON.stringify(last));
}

async function stop() {
  const end = (await ask({})).message.content.split(" ")[2];
  const stopped = await ask({ options: { ...GREEDY, stop: [end] } });
  check(stopped.done_reason === "stop", JSON.stringify(stopped));
  check(!stopped.message.content.includes(end), JSON.stringify(stopped));
}

async function seed() {
  const options = { num_predict: 48, temperature: 1, seed: 7 };
  const texts = [(await ask({ options })).message.content, (await ask({ options })).message.content];
  check(texts[0] === texts[1], `the same seed gave ${texts}`);
}

async function logprobs() {
  const answer = await ask({ logprobs: true, top_logprobs: 2 });
  check(answer.logprobs.length === answer.eval_count, `${answer.logprobs.length}`);
}

async function loop() {
  const call = { function: { name: "get_weather", arguments: { city: "Paris" } } };
  const messages = [
    ...QUESTION,
    { role: "assistant", content: "", tool_calls: [call] },
    { role: "tool", content: "Sunny.", tool_name: "get_weather" },
  ];
  const { message } = await ask({ messages, tools: [TOOL] });
  check(message.content || message.tool_calls, "there is no answer");
}

async function schema() {
  checkCity((await ask({ format: WEATHER, options: { seed: 1 } })).message.content);
}

async function error() {
  try {
    await ask({ options: { num_ctx: 1000000 } });
  } catch (refused) {
    check(refused.status_code === 400 && refused.message.includes("num_ctx"), `${refused}`);
    return;
  }
  check(false, "nothing was thrown");
}

async function cancel() {
  const pieces = await ask({ stream: true, options: { num_predict: 2000 } });
  for await (const _ of pieces) break;
  pieces.abort();
  await checkIdle();
}

await run({
  chat,
  stream,
  history,
  usage,
  stop,
  seed,
  logprobs,
  "tool loop": loop,
  schema,
  error,
  cancel,
});
