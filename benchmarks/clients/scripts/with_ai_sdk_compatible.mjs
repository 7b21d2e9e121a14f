// Vercel's AI SDK with @ai-sdk/openai-compatible.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { capabilities, seeds, stops } from "./ai_sdk.mjs";
import { BASE_URL, MODEL, run } from "./protocol.mjs";

const provider = createOpenAICompatible({
  name: "legato",
  baseURL: BASE_URL,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider(MODEL);

await run({ ...capabilities(model), stop: () => stops(model), seed: () => seeds(model) });
