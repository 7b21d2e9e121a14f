// What Vercel's AI SDK does over a provider of either package.

import { APICallError, generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { WEATHER, check, checkCity, checkIdle } from "./protocol.mjs";

const PROMPT = "What is the weather in Paris?";
// A small model calls a tool several times.
const ROOM = { maxOutputTokens: 700 };
const SMALL = { prompt: PROMPT, maxOutputTokens: 48, maxRetries: 0 };

export function capabilities(model) {
  const get_weather = tool({
    description: "Weather now",
    inputSchema: jsonSchema(WEATHER),
    execute: async ({ city }) => `It is sunny in ${city}.`,
  });
  const get_forecast = tool({ description: "Weather tomorrow", inputSchema: jsonSchema(WEATHER) });
  const ask = (options) => generateText({ model, ...SMALL, ...options });

  async function chat() {
    check((await ask({})).text, "there is no text");
  }

  async function stream() {
    const pieces = [];
    for await (const piece of streamText({ model, ...SMALL }).textStream) pieces.push(piece);
    check(pieces.length > 2, "the text came in one piece");
  }

  async function history() {
    const first = await ask({ system: "Be brief." });
    const question = { role: "user", content: PROMPT };
    const messages = [question, ...first.response.messages, question];
    check((await ask({ prompt: undefined, messages, system: "Be brief." })).text, "there is no text");
  }

  async function usage() {
    check((await ask({})).usage.outputTokens > 0, "there is none");
    check((await streamText({ model, ...SMALL }).usage).outputTokens > 0, "the stream has none");
  }

  async function required() {
    const { toolCalls } = await ask({ ...ROOM, tools: { get_weather, get_forecast }, toolChoice: "required" });
    checkCity(toolCalls[0].input);
  }

  async function named() {
    const toolChoice = { type: "tool", toolName: "get_forecast" };
    const { toolCalls } = await ask({ ...ROOM, tools: { get_weather, get_forecast }, toolChoice });
    check(toolCalls[0].toolName === "get_forecast", JSON.stringify(toolCalls));
  }

  async function loop() {
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" });
    const tools = { get_weather };
    const { steps } = await ask({ ...ROOM, tools, prepareStep, stopWhen: stepCountIs(2) });
    check(steps.length === 2 && steps[0].toolResults.length > 0, `${steps.length} steps`);
  }

  async function streamedTool() {
    const asked = streamText({ model, ...SMALL, ...ROOM, tools: { get_weather }, toolChoice: "required" });
    const kinds = [];
    for await (const part of asked.fullStream) kinds.push(part.type);
    check(kinds.filter((kind) => kind === "tool-input-delta").length > 1, `parts were ${kinds}`);
    checkCity((await asked.toolCalls)[0].input);
  }

  async function schema() {
    checkCity((await generateObject({ model, ...SMALL, ...ROOM, schema: jsonSchema(WEATHER) })).object);
  }

  async function error() {
    try {
      await ask({ temperature: -1 });
    } catch (refused) {
      check(APICallError.isInstance(refused), `${refused}`);
      check(refused.message.includes("temperature"), `${refused}`);
      return;
    }
    check(false, "nothing was thrown");
  }

  async function cancel() {
    const leaving = new AbortController();
    const prompt = "Count from 1 to 1000, one number a line.";
    const asked = streamText({
      model,
      prompt,
      maxOutputTokens: 2000,
      abortSignal: leaving.signal,
      onError: () => {},
    });
    for await (const _ of asked.textStream) {
      leaving.abort();
      break;
    }
    await checkIdle();
  }

  return {
    chat,
    stream,
    history,
    usage,
    tool: required,
    "named tool": named,
    "tool loop": loop,
    "streamed tool": streamedTool,
    schema,
    error,
    cancel,
  };
}

export async function stops(model) {
  const end = (await generateText({ model, ...SMALL, temperature: 0 })).text.split(" ")[2];
  const stopped = await generateText({ model, ...SMALL, temperature: 0, stopSequences: [end] });
  check(stopped.finishReason === "stop" && !stopped.text.includes(end), stopped.text);
}

export async function seeds(model) {
  const asked = { model, ...SMALL, seed: 7, temperature: 1 };
  const texts = [(await generateText(asked)).text, (await generateText(asked)).text];
  check(texts[0] === texts[1], `the same seed gave ${texts}`);
}
