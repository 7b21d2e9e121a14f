// Anthropic's Claude Code, without a terminal.

import { createRequire } from "node:module";
import { tryAgent } from "./agent.mjs";
import { KEY, MODEL } from "./protocol.mjs";

const manifest = createRequire(import.meta.url).resolve("@anthropic-ai/claude-code/package.json");
const FLAGS = ["--allowedTools", "Bash", "--print"];

await tryAgent({
  program: [process.execPath, manifest.replace("package.json", "cli-wrapper.cjs")],
  ask: (prompt) => [...FLAGS, prompt],
  again: (prompt) => ["--continue", ...FLAGS, prompt],
  shell: "Bash",
  call: (command) => ({ command, description: "Prints" }),
  environment: (baseUrl) => ({
    ANTHROPIC_BASE_URL: baseUrl.replace(/\/v1$/, ""),
    ANTHROPIC_AUTH_TOKEN: KEY,
    ANTHROPIC_MODEL: MODEL,
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
    ENABLE_TOOL_SEARCH: "false", // else it learns by an error that tools cannot be deferred
  }),
  isAnthropic: true,
});
