"""GuideLLM."""

import json
from pathlib import Path

from protocol import MODEL, TOKENIZER, URL, can, check, run
from tool import OUTPUT_TOKENS, PROMPT_TOKENS, REQUESTS, run_tool


def report(request_format: str) -> dict:
    """The run's metrics."""
    run_tool(
        "guidellm",
        "run",
        *(
            "--backend",
            f"kind=openai_http,target={URL},model={MODEL},request_format={request_format}",
        ),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
        "--data",
        f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        *("--output", "kind=json,path=report.json"),
        "--disable-progress",
    )
    (benchmark,) = json.loads(Path("report.json").read_text())["benchmarks"]
    return benchmark["metrics"]


def check_run(request_format: str) -> None:
    totals = report(request_format)["request_totals"]
    check(totals["successful"] == REQUESTS and totals["errored"] == 0, f"{totals}")


@can("chat run")
def chat_run() -> None:
    check_run("/v1/chat/completions")


@can("completions run")
def completions_run() -> None:
    check_run("/v1/completions")


@can("lengths")
def lengths() -> None:
    counted = report("/v1/chat/completions")["output_token_count"]["successful"]
    check(counted["min"] == counted["max"] == OUTPUT_TOKENS, f"{counted}")


run()
