"""EleutherAI's LM Evaluation Harness, with small tasks that it reads from this folder."""

import json
from pathlib import Path

from protocol import MODEL, TOKENIZER, URL, can, check, run
from tool import run_tool

QUESTIONS = [
    {"question": "Paris is the capital of", "choices": ["France", "Italy"], "answer": 0},
    {"question": "Rome is the capital of", "choices": ["France", "Italy"], "answer": 1},
]
COMMON = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(Path("questions.json").absolute())}},
    "test_split": "test",
    "doc_to_text": "question",
}
CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}],
}
WORDS = {
    "output_type": "generate_until",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
    "metric_list": [{"metric": "exact_match"}],
}
Path("questions.json").write_text("\n".join(map(json.dumps, QUESTIONS)))
for name, task in {"choices": CHOICES, "words": WORDS}.items():
    Path(f"{name}.yaml").write_text(json.dumps({"task": name, **COMMON, **task}))  # JSON is YAML


def result(model: str, endpoint: str, task: str, *more: str) -> dict:
    server = f"base_url={URL}{endpoint},model={MODEL},max_retries=1"
    tokenizer = f"tokenizer_backend=huggingface,tokenizer={TOKENIZER}"
    run_tool(
        "lm-eval",
        *("run", "--model", model, "--model_args", f"{server},{tokenizer}"),
        *("--tasks", task, "--include_path", ".", "--output_path", f"{model}-{task}", *more),
    )
    (report,) = Path(f"{model}-{task}").rglob("results*.json")
    return json.loads(report.read_text())["results"][task]


@can("chat run")
def chat_run() -> None:
    answered = ("local-chat-completions", "/v1/chat/completions", "words", "--apply_chat_template")
    check("exact_match,none" in result(*answered), "there is no result")


@can("completions run")
def completions_run() -> None:
    check(
        "exact_match,none" in result("local-completions", "/v1/completions", "words"),
        "there is no result",
    )


@can("scores")
def scores() -> None:
    found = result("local-completions", "/v1/completions", "choices")
    check(found["acc,none"] == 1.0, f"a question that any model knows: {found}")


run()
