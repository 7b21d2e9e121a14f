// OpenAI's own client for Node.

import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { BASE_URL, KEY, MODEL, WEATHER, check, checkCity, checkIdle, run } from "./protocol.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: KEY, maxRetries: 0 });
const QUESTION = [{ role: "user", content: "What is the weather in Paris?" }];
const TOOL = {
  type: "function",
  function: { name: "get_weather", description: "Weather now", parameters: WEATHER },
};
const FORECAST = { type: "function", function: { ...TOOL.function, name: "get_forecast" } };
const SMALL = { model: MODEL, messages: QUESTION, max_tokens: 48 };
const PLACE = z.object({ city: z.enum(["Paris", "Rome"]), cold: z.boolean() });

// A small model calls a tool several times.
const ROOM = { max_tokens: 700 };

const create = (options) => client.chat.completions.create({ ...SMALL, ...options });
const text = async (options) => (await create(options)).choices[0].message.content;

async function chat() {
  check(await text({}), "there is no text");
}

async function stream() {
  const pieces = [];
  for await (const chunk of await create({ temperature: 0, stream: true })) {
    pieces.push(chunk.choices[0].delta.content ?? "");
  }
  check(pieces.length > 2, "the text came in one piece");
  check(pieces.join("") === (await text({ temperature: 0 })), `${pieces} are not the text`);
}

async function history() {
  const system = { role: "system", content: "Be brief." };
  const { choices } = await create({ messages: [system, ...QUESTION] });
  const again = [system, ...QUESTION, choices[0].message, ...QUESTION];
  check(await text({ messages: again }), "there is no text");
}

async function usage() {
  const whole = (await create({ temperature: 0 })).usage;
  let last;
  const options = { temperature: 0, stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await create(options)) last = chunk;
  check(last.usage.completion_tokens === whole.completion_tokens, "the stream's is another");
}

async function stop() {
  const end = (await text({ temperature: 0 })).split(" ")[2];
  const stopped = (await create({ temperature: 0, stop: end })).choices[0];
  check(stopped.finish_reason === "stop", JSON.stringify(stopped));
  check(!stopped.message.content.includes(end), JSON.stringify(stopped));
}

async function seed() {
  const texts = [await text({ seed: 7, temperature: 1 }), await text({ seed: 7, temperature: 1 })];
  check(texts[0] === texts[1], `the same seed gave ${texts}`);
}

async function several() {
  check((await create({ n: 3 })).choices.length === 3, "not three choices");
}

async function logprobs() {
  const { choices } = await create({ logprobs: true, top_logprobs: 2 });
  const tokens = choices[0].logprobs.content;
  check(tokens.every((token) => token.top_logprobs.length === 2), "not two alternatives each");
}

async function required() {
  const answer = await create({ ...ROOM, tools: [TOOL, FORECAST], tool_choice: "required" });
  check(answer.choices[0].finish_reason === "tool_calls", answer.choices[0].finish_reason);
  checkCity(answer.choices[0].message.tool_calls[0].function.arguments);
}

async function named() {
  const choice = { type: "function", function: { name: "get_forecast" } };
  const answer = await create({ ...ROOM, tools: [TOOL, FORECAST], tool_choice: choice });
  const [call] = answer.choices[0].message.tool_calls;
  check(call.function.name === "get_forecast", JSON.stringify(call));
}

async function loop() {
  const { choices } = await create({ ...ROOM, tools: [TOOL], tool_choice: "required" });
  const results = choices[0].message.tool_calls.map((call) => ({
    role: "tool",
    tool_call_id: call.id,
    content: "Sunny.",
  }));
  const messages = [...QUESTION, choices[0].message, ...results];
  const answer = (await create({ ...ROOM, tools: [TOOL], messages })).choices[0].message;
  check(answer.content || answer.tool_calls, "there is no answer");
}

async function streamedTool() {
  const events = client.chat.completions.stream({
    ...SMALL,
    ...ROOM,
    tools: [TOOL],
    tool_choice: "required",
  });
  let pieces = 0;
  events.on("tool_calls.function.arguments.delta", () => (pieces += 1));
  const answer = await events.finalChatCompletion();
  check(pieces > 1, "the arguments came in one piece");
  checkCity(answer.choices[0].message.tool_calls[0].function.arguments);
}

async function schema() {
  const format = zodResponseFormat(PLACE, "place");
  const answer = await client.chat.completions.parse({ ...SMALL, ...ROOM, response_format: format });
  PLACE.parse(answer.choices[0].message.parsed);
}

async function responses() {
  const asked = { model: MODEL, input: "Hello", temperature: 0, max_output_tokens: 200 };
  const answer = await client.responses.create({ ...asked, instructions: "Be brief." });
  check(answer.output_text, "there is no text");
  const events = client.responses.stream(asked);
  let pieces = 0;
  events.on("response.output_text.delta", () => (pieces += 1));
  check((await events.finalResponse()).output_text, "there is no text at the stream's end");
  check(pieces > 1, "the text came in one piece");
  const tool = { type: "function", ...TOOL.function, strict: true };
  const called = await client.responses.create({ ...asked, tools: [tool], tool_choice: "required" });
  checkCity(called.output[0].arguments);
  const text = { format: zodTextFormat(PLACE, "place") };
  PLACE.parse((await client.responses.parse({ ...asked, text })).output_parsed);
}

async function error() {
  try {
    await create({ temperature: -1 });
  } catch (refused) {
    check(refused instanceof OpenAI.BadRequestError, `${refused}`);
    check(refused.param === "temperature" && refused.message.includes("temperature"), `${refused}`);
    return;
  }
  check(false, "nothing was thrown");
}

async function cancel() {
  const events = await create({ max_tokens: 2000, ignore_eos: true, stream: true });
  for await (const _ of events) break;
  await checkIdle();
}

await run({
  chat,
  stream,
  history,
  usage,
  stop,
  seed,
  n: several,
  logprobs,
  tool: required,
  "named tool": named,
  "tool loop": loop,
  "streamed tool": streamedTool,
  schema,
  responses,
  error,
  cancel,
});
