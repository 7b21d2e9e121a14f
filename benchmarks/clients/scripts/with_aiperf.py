"""NVIDIA's AIPerf."""

import json
from pathlib import Path

from protocol import MODEL, TOKENIZER, URL, can, check, run
from tool import OUTPUT_TOKENS, PROMPT_TOKENS, REQUESTS, run_tool


def report(endpoint: str, *more: str) -> dict:
    run_tool(
        "aiperf",
        "profile",
        *("--model", MODEL, "--url", URL, "--endpoint-type", endpoint, "--streaming"),
        *("--tokenizer", TOKENIZER, "--synthetic-input-tokens-mean", str(PROMPT_TOKENS)),
        *("--output-tokens-mean", str(OUTPUT_TOKENS), "--extra-inputs", "ignore_eos:true"),
        *("--request-count", str(REQUESTS), "--concurrency", "2", "--ui", "none"),
        *("--artifact-dir", endpoint, *more),
        # Told that there is no hub, it looks for folders in the hub's cache alone.
        online=True,
    )
    return json.loads((Path(endpoint) / "profile_export_aiperf.json").read_text())


def check_run(endpoint: str) -> None:
    found = report(endpoint)
    check(found["request_count"]["avg"] == REQUESTS, f"{found['request_count']}")
    check(not found.get("error_summary"), f"{found.get('error_summary')}")


@can("chat run")
def chat_run() -> None:
    check_run("chat")


@can("completions run")
def completions_run() -> None:
    check_run("completions")


@can("lengths")
def lengths() -> None:
    # Its own count is of the text, encoded again, which may be in fewer tokens.
    counted = report("chat", "--use-server-token-count")["output_sequence_length"]
    check(counted["min"] == counted["max"] == OUTPUT_TOKENS, f"{counted}")


run()
