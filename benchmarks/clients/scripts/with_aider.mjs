// Aider, without a terminal. It calls no tools: the model writes files, and Aider then runs a test.

import { fileURLToPath } from "node:url";
import { COMMAND, tryAgent } from "./agent.mjs";
import { KEY, MODEL } from "./protocol.mjs";

const FLAGS = [
  ...["--model", `openai/${MODEL}`, "--edit-format", "whole", "--yes-always", "--no-git"],
  ...["--auto-test", "--test-cmd", `${COMMAND}; exit 1`],
  ...["--analytics-disable", "--no-check-update", "--no-show-model-warnings", "--no-pretty"],
];

await tryAgent({
  program: [fileURLToPath(new URL("bin/aider", import.meta.url))],
  ask: (prompt) => [...FLAGS, "--message", prompt],
  again: (prompt) => [...FLAGS, "--restore-chat-history", "--message", prompt],
  edit: "greeting.txt\n```\nHi.\n```",
  printed: [2, 0, 2], // it says the output twice, and stores it nowhere
  environment: (baseUrl) => ({ OPENAI_API_BASE: baseUrl, OPENAI_API_KEY: KEY }),
});
