"""vLLM's `vllm bench serve`."""

import json
from pathlib import Path

from protocol import MODEL, TOKENIZER, URL, can, check, run
from tool import OUTPUT_TOKENS, PROMPT_TOKENS, REQUESTS, run_tool


def report(backend: str, endpoint: str) -> dict:
    run_tool(
        "vllm",
        *("bench", "serve", "--backend", backend, "--endpoint", endpoint, "--base-url", URL),
        *("--model", MODEL, "--tokenizer", TOKENIZER, "--dataset-name", "random"),
        *("--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)),
        *("--num-prompts", str(REQUESTS), "--ignore-eos", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-filename", "report.json"),
    )
    return json.loads(Path("report.json").read_text())


def check_run(backend: str, endpoint: str) -> None:
    found = report(backend, endpoint)
    check(found["completed"] == REQUESTS and found["failed"] == 0, f"{found['errors']}")


@can("chat run")
def chat_run() -> None:
    check_run("openai-chat", "/v1/chat/completions")


@can("completions run")
def completions_run() -> None:
    check_run("openai", "/v1/completions")


@can("lengths")
def lengths() -> None:
    counts = set(report("openai-chat", "/v1/chat/completions")["output_lens"])
    check(counts == {OUTPUT_TOKENS}, f"{counts}")


run()
