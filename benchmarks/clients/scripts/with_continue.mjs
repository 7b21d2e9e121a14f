// Continue's cn, without a terminal.

import { mkdirSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tryAgent } from "./agent.mjs";
import { KEY, MODEL } from "./protocol.mjs";

const program = createRequire(import.meta.url).resolve("@continuedev/cli/dist/cn.js");

const config = (apiBase) => ({
  name: "Legato",
  version: "1.0.0",
  schema: "v1",
  models: [
    {
      ...{ name: MODEL, provider: "openai", model: MODEL, apiBase, apiKey: KEY, roles: ["chat"] },
      defaultCompletionOptions: { contextLength: 32768, maxTokens: 2048 },
    },
  ],
});

await tryAgent({
  program: [process.execPath, program],
  prepare: (baseUrl) => {
    mkdirSync(".continue", { recursive: true });
    writeFileSync(".continue/config.yaml", JSON.stringify(config(baseUrl))); // JSON is YAML
  },
  ask: (prompt) => ["--print", prompt],
  again: (prompt) => ["--print", "--resume", prompt],
  shell: "Bash",
  call: (command) => ({ command }),
  environment: () => ({ CONTINUE_METRICS_ENABLED: "0" }),
});
