// Cline, without a terminal.

import { spawnSync } from "node:child_process";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { tryAgent } from "./agent.mjs";
import { KEY, MODEL } from "./protocol.mjs";

const manifest = createRequire(import.meta.url).resolve("cline/package.json");
const cline = join(dirname(manifest), "bin", "cline");
const goesOn = fileURLToPath(new URL("cline_session.mjs", import.meta.url));
const ALONE = { CLINE_SESSION_BACKEND_MODE: "local", CLINE_NO_AUTO_UPDATE: "1" }; // without a daemon

function lastSession() {
  const env = { ...process.env, HOME: process.cwd(), ...ALONE };
  const args = [cline, "history", "--json", "--limit", "1"];
  const [session] = JSON.parse(spawnSync(process.execPath, args, { env, encoding: "utf8" }).stdout);
  return session.sessionId;
}

await tryAgent({
  program: [process.execPath],
  prepare: (baseUrl) => [
    ...[cline, "auth", "--provider", "openai-compatible", "--apikey", KEY],
    ...["--modelid", MODEL, "--baseurl", baseUrl],
  ],
  ask: (prompt) => [cline, prompt],
  again: (prompt) => [goesOn, cline, lastSession(), prompt],
  shell: "run_commands",
  call: (command) => ({ commands: [command] }),
  // Without a key of Cline's own, a protocol's session waits for a sign-in.
  environment: () => ({ ...ALONE, CLINE_API_KEY: KEY, CLINE_PROVIDER: "openai-compatible" }),
});
