"""GenAI Bench."""

import json
from pathlib import Path

from protocol import KEY, MODEL, TOKENIZER, URL, can, check, run
from tool import OUTPUT_TOKENS, PROMPT_TOKENS, REQUESTS, run_tool


def report(name: str) -> dict:
    run_tool(
        "genai-bench",
        "benchmark",
        *("--api-backend", "vllm", "--api-base", URL, "--api-key", KEY, "--api-model-name", MODEL),
        *("--model-tokenizer", TOKENIZER, "--task", "text-to-text", "--num-concurrency", "2"),
        *("--max-time-per-run", "1", "--max-requests-per-run", str(REQUESTS)),
        *("--traffic-scenario", f"D({PROMPT_TOKENS},{OUTPUT_TOKENS})"),
        *("--additional-request-params", '{"ignore_eos": true}'),
        *("--experiment-base-dir", ".", "--experiment-folder-name", name),
    )
    (found,) = Path(name).glob("D*.json")
    return json.loads(found.read_text())


@can("chat run")
def chat_run() -> None:
    found = report("chat")["aggregated_metrics"]
    check(found["num_completed_requests"] >= REQUESTS, f"{found['num_completed_requests']}")
    check(found["num_error_requests"] == 0, f"{found['error_codes_frequency']}")


@can("lengths")
def lengths() -> None:
    found = report("lengths")["individual_request_metrics"]
    counts = {request["num_output_tokens"] for request in found}
    check(counts == {OUTPUT_TOKENS}, f"{counts}")


run()
