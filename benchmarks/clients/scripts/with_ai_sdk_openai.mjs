// Vercel's AI SDK with @ai-sdk/openai, whose default is Responses.

import { createOpenAI } from "@ai-sdk/openai";
import { capabilities, seeds, stops } from "./ai_sdk.mjs";
import { BASE_URL, KEY, MODEL, run } from "./protocol.mjs";

const provider = createOpenAI({ baseURL: BASE_URL, apiKey: KEY });
const overChat = provider.chat(MODEL);
const overResponses = capabilities(provider(MODEL));

async function responses() {
  for (const name of ["chat", "stream", "history", "tool loop", "streamed tool", "schema"]) {
    await overResponses[name]();
  }
}

await run({
  ...capabilities(overChat),
  stop: () => stops(overChat),
  seed: () => seeds(overChat),
  responses,
});
