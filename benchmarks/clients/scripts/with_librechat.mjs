// The agents of LibreChat, which its server runs for every conversation.

import { randomUUID } from "node:crypto";
import { tool } from "@langchain/core/tools";
import { Providers, createAgentSession } from "@librechat/agents";
import { z } from "zod";
import { BASE_URL, KEY, MODEL, check, checkCity, checkIdle, run } from "./protocol.mjs";

const QUESTION = "What is the weather in Paris?";
const CITY = z.object({ city: z.enum(["Paris", "Rome"]) });

// Args: options: further ones of the model. tools: that the agent has; it ends once they have run.
async function session(options = {}, tools = []) {
  const llmConfig = {
    provider: Providers.OPENAI,
    model: MODEL,
    apiKey: KEY,
    streaming: true,
    maxTokens: 48,
    maxRetries: 0,
    configuration: { baseURL: BASE_URL },
    ...options,
  };
  const graphConfig = { type: "standard", instructions: "Be brief.", llmConfig, tools, toolEnd: true };
  return createAgentSession({ sessionPath: `${randomUUID()}.jsonl`, graphConfig });
}

async function chat() {
  check((await (await session()).run(QUESTION)).text, "there is no text");
}

async function stream() {
  const asked = (await session()).stream(QUESTION);
  const pieces = [];
  for await (const piece of asked.toTextStream()) pieces.push(piece);
  check(pieces.length > 2, "the text came in one piece");
  check(pieces.join("") === (await asked.finalResult()).text, "the pieces are not the text");
}

async function history() {
  const asked = await session();
  const first = await asked.run(QUESTION);
  const second = await asked.run("And in Rome?");
  check(second.text, "there is no text");
  check(second.usage.inputTokens > first.usage.inputTokens, "the conversation did not go on");
}

async function usage() {
  check((await (await session()).run(QUESTION)).usage.outputTokens > 0, "there is none");
}

async function loop() {
  const cities = [];
  const getWeather = tool(
    ({ city }) => {
      cities.push(city);
      return `It is sunny in ${city}.`;
    },
    { name: "get_weather", description: "Weather now", schema: CITY },
  );
  const modelKwargs = { tool_choice: "required", parallel_tool_calls: false };
  const asked = await session({ maxTokens: 700, modelKwargs }, [getWeather]);
  await asked.run(QUESTION);
  checkCity({ city: cities[0] });
  delete modelKwargs.tool_choice; // the model is free in its second turn
  const { text, steps } = await asked.run("And now?");
  check(text || steps.length, "there is no answer");
}

async function error() {
  try {
    await (await session({ temperature: -1 })).run(QUESTION);
  } catch (refused) {
    check(refused.message.includes("temperature"), `${refused}`);
    return;
  }
  check(false, "nothing was thrown");
}

async function cancel() {
  const asked = await session({ maxTokens: 2000, modelKwargs: { ignore_eos: true } });
  const leaving = new AbortController();
  const running = asked.stream(QUESTION, { config: { signal: leaving.signal } });
  running.finalResult().catch(() => {});
  for await (const _ of running.toTextStream()) break;
  leaving.abort();
  await checkIdle();
}

await run({ chat, stream, history, usage, "tool loop": loop, error, cancel });
