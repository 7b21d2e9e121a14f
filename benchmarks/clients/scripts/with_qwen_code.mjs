// qwen-code, without a terminal.

import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { tryAgent } from "./agent.mjs";
import { KEY, MODEL } from "./protocol.mjs";

const manifest = createRequire(import.meta.url).resolve("@qwen-code/qwen-code/package.json");
const FLAGS = ["--yolo", "--auth-type", "openai"];

await tryAgent({
  program: [process.execPath, join(dirname(manifest), "cli.js")],
  ask: (prompt) => [...FLAGS, "--prompt", prompt],
  again: (prompt) => [...FLAGS, "--continue", "--prompt", prompt],
  shell: "run_shell_command",
  call: (command) => ({ command, is_background: false }),
  environment: (baseUrl) => ({
    OPENAI_BASE_URL: baseUrl,
    OPENAI_API_KEY: KEY,
    OPENAI_MODEL: MODEL,
    QWEN_CODE_MAX_OUTPUT_TOKENS: "2048", // else up to 32,000, which do not fit beside its prompt
  }),
});
