// opencode, without a terminal.

import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { tryAgent } from "./agent.mjs";
import { MODEL } from "./protocol.mjs";

const manifest = createRequire(import.meta.url).resolve("opencode-ai/package.json");

const config = (baseURL) => ({
  provider: {
    legato: {
      npm: "@ai-sdk/openai-compatible",
      options: { baseURL, apiKey: "none" },
      models: { [MODEL]: { limit: { context: 32768, output: 2048 } } },
    },
  },
  model: `legato/${MODEL}`,
  autoupdate: false,
  share: "disabled",
});

await tryAgent({
  program: [join(dirname(manifest), "bin", "opencode.exe")],
  ask: (prompt) => ["run", prompt],
  again: (prompt) => ["run", "--continue", prompt],
  shell: "bash",
  call: (command) => ({ command, description: "Says a number" }),
  environment: (baseUrl) => ({ OPENCODE_CONFIG_CONTENT: JSON.stringify(config(baseUrl)) }),
});
