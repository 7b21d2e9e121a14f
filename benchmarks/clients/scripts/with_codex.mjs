// OpenAI's Codex, without a terminal.

import { createRequire } from "node:module";
import { tryAgent } from "./agent.mjs";
import { MODEL } from "./protocol.mjs";

const program = createRequire(import.meta.url).resolve("@openai/codex/bin/codex.js");
const FREE = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"];

const set = (name, value) => ["-c", `${name}=${JSON.stringify(value)}`];
const provider = (baseUrl) => [
  ...set("model", MODEL),
  ...set("model_provider", "legato"),
  ...set("model_providers.legato.name", "Legato"),
  ...set("model_providers.legato.base_url", baseUrl),
  ...set("model_providers.legato.wire_api", "responses"),
];

await tryAgent({
  program: [process.execPath, program],
  ask: (prompt, baseUrl) => ["exec", ...FREE, ...provider(baseUrl), prompt],
  again: (prompt, baseUrl) => ["exec", "resume", "--last", ...FREE, ...provider(baseUrl), prompt],
  shell: "exec_command",
  call: (cmd) => ({ cmd }),
});
