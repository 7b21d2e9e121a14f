// LangChain's ChatOpenAI for Node, set up as n8n's node "OpenAI Chat Model" does.

import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";
import { BASE_URL, KEY, MODEL, check, checkCity, checkIdle, run } from "./protocol.mjs";

const QUESTION = [["human", "What is the weather in Paris?"]];
const CITY = z.object({ city: z.enum(["Paris", "Rome"]) });
const PLACE = CITY.extend({ cold: z.boolean() });
const ROOM = { maxTokens: 700 }; // a small model calls a tool several times
const getWeather = tool(({ city }) => `It is sunny in ${city}.`, {
  name: "get_weather",
  description: "Weather now",
  schema: CITY,
});
const getForecast = tool(({ city }) => `It rains in ${city}.`, {
  name: "get_forecast",
  description: "Weather tomorrow",
  schema: CITY,
});

function model(options = {}) {
  return new ChatOpenAI({
    model: MODEL,
    apiKey: KEY,
    maxTokens: 48,
    maxRetries: 0,
    configuration: { baseURL: BASE_URL },
    supportsStrictToolCalling: false,
    ...options,
  });
}

async function gathered(stream) {
  const chunks = [];
  for await (const chunk of await stream) chunks.push(chunk);
  return chunks;
}

async function chat() {
  check((await model().invoke(QUESTION)).text, "there is no text");
}

async function stream() {
  const asked = model({ temperature: 0 });
  const pieces = (await gathered(asked.stream(QUESTION))).map((chunk) => chunk.text);
  check(pieces.length > 2, "the text came in one piece");
  check(pieces.join("") === (await asked.invoke(QUESTION)).text, "the pieces are not the text");
}

async function history() {
  const messages = [["system", "Be brief."], ...QUESTION];
  const answer = await model().invoke(messages);
  check((await model().invoke([...messages, answer, ...QUESTION])).text, "there is no text");
}

async function usage() {
  const asked = model({ temperature: 0 });
  const whole = (await asked.invoke(QUESTION)).usage_metadata;
  const told = (await gathered(asked.stream(QUESTION))).map((chunk) => chunk.usage_metadata);
  const last = told.filter(Boolean).at(-1);
  check(last.output_tokens === whole.output_tokens, `${JSON.stringify(last)} is another`);
}

async function stop() {
  const asked = model({ temperature: 0 });
  const end = (await asked.invoke(QUESTION)).text.split(" ")[2];
  const stopped = await asked.invoke(QUESTION, { stop: [end] });
  check(stopped.response_metadata.finish_reason === "stop", JSON.stringify(stopped));
  check(!stopped.text.includes(end), stopped.text);
}

async function seed() {
  const ask = async () => (await model({ temperature: 1 }).invoke(QUESTION, { seed: 7 })).text;
  const texts = [await ask(), await ask()];
  check(texts[0] === texts[1], `the same seed gave ${texts}`);
}

async function several() {
  const { generations } = await model({ n: 3 }).generate([QUESTION.map(([, content]) => content)]);
  check(generations[0].length === 3, "not three choices");
}

async function logprobs() {
  const answer = await model({ logprobs: true, topLogprobs: 2 }).invoke(QUESTION);
  const tokens = answer.response_metadata.logprobs.content;
  check(tokens.every((token) => token.top_logprobs.length === 2), "not two alternatives each");
}

async function required() {
  const asked = model(ROOM).bindTools([getWeather, getForecast], { tool_choice: "required" });
  checkCity((await asked.invoke(QUESTION)).tool_calls[0].args);
}

async function named() {
  const asked = model(ROOM).bindTools([getWeather, getForecast], { tool_choice: "get_forecast" });
  const [call] = (await asked.invoke(QUESTION)).tool_calls;
  check(call.name === "get_forecast", JSON.stringify(call));
}

async function loop() {
  const asked = model(ROOM);
  const called = await asked.bindTools([getWeather], { tool_choice: "required" }).invoke(QUESTION);
  const results = await Promise.all(called.tool_calls.map((call) => getWeather.invoke(call)));
  const answer = await asked.bindTools([getWeather]).invoke([...QUESTION, called, ...results]);
  check(answer.text || answer.tool_calls.length, "there is no answer");
}

async function streamedTool() {
  const asked = model(ROOM).bindTools([getWeather], { tool_choice: "required" });
  const chunks = await gathered(asked.stream(QUESTION));
  const whole = chunks.reduce((first, second) => first.concat(second));
  check(chunks.filter((chunk) => chunk.tool_call_chunks?.length).length > 1, "it came in one piece");
  checkCity(whole.tool_calls[0].args);
}

async function schema() {
  for (const method of ["jsonSchema", "functionCalling"]) {
    const asked = model(ROOM).withStructuredOutput(PLACE, { method, name: "place" });
    PLACE.parse(await asked.invoke(QUESTION));
  }
}

async function responses() {
  const asked = model({ ...ROOM, useResponsesApi: true });
  check((await asked.invoke(QUESTION)).text, "there is no text");
  const pieces = (await gathered(asked.stream(QUESTION))).map((chunk) => chunk.text);
  check(pieces.join(""), "there is no text in the stream");
  const called = asked.bindTools([getWeather], { tool_choice: "get_weather" }); // it drops "required"
  checkCity((await called.invoke(QUESTION)).tool_calls[0].args);
}

async function error() {
  try {
    await model({ temperature: -1 }).invoke(QUESTION);
  } catch (refused) {
    check(refused.status === 400 && refused.message.includes("temperature"), `${refused}`);
    return;
  }
  check(false, "nothing was thrown");
}

async function cancel() {
  const leaving = new AbortController();
  const asked = model({ maxTokens: 2000, modelKwargs: { ignore_eos: true } });
  for await (const _ of await asked.stream(QUESTION, { signal: leaving.signal })) break;
  leaving.abort();
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
