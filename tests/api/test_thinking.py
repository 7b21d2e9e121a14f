"""Thinking budgets from a client's field to the cut, on a model that cannot stop thinking."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from legato import LLM, SamplingParams, StructuredOutputs
from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL
from legato.core.errors import InvalidRequestError
from legato.language.completion import Completion
from tests.api.launch import ServerProcess, running_server
from tests.exact import EXACT

TEMPLATE = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content %}{{ '<|channel>thought\n' + m.reasoning_content + '<channel|>' }}
{%- endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<|channel>thought\n' }}{% endif %}"""
MARKS = {b"<reponame>": b"<|channel>", b"<filename>": b"<channel|>"}
"""Key a special token of the model; value Gemma 4's mark, which takes its place."""
PATH = "/v1/chat/completions"
BUDGET, CAP, DEFAULT = 7, 20, 12
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    "max_tokens": 40,
    "temperature": 0,
    "return_token_ids": True,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = resolve_source(DEFAULT_MODEL).path.read_bytes()
    for token, mark in MARKS.items():
        data = data.replace(token, mark)
    model = tmp_path_factory.mktemp("thinking") / "thinking.gguf"
    model.write_bytes(data)
    return model


@pytest.fixture(scope="module")
def thinking(model: Path) -> Iterator[ServerProcess]:
    """It drafts, and its prompts open a thought that the model does not end by itself."""
    budgets = ("--reasoning-budget", str(DEFAULT), "--max-reasoning-budget", str(CAP))
    flags = ("--speculative", "8", "--no-calibrate", "--chat-template", TEMPLATE, *budgets)
    with running_server(model.parent, str(model), *EXACT, *flags) as server:
        yield server


def answer(server: ServerProcess, path: str = PATH, **fields: Any) -> dict[str, Any]:
    response = server.http.post(path, json={**CHAT, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def num_thought(said: dict[str, Any]) -> int:
    count: int = said["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return count


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({"thinking_token_budget": BUDGET}, BUDGET),
        ({"thinking_budget": BUDGET}, BUDGET),
        ({"thinking": {"type": "enabled", "budget_tokens": BUDGET}}, BUDGET),
        ({}, DEFAULT),
        ({"thinking_token_budget": -1}, CAP),
        ({"thinking_token_budget": 30}, CAP),
        ({"thinking_token_budget": 10**40}, CAP),
    ],
)
def test_a_thought_is_cut_and_the_answer_follows(
    thinking: ServerProcess, fields: dict[str, Any], budget: int
) -> None:
    said = answer(thinking, **fields)
    choice = said["choices"][0]
    assert num_thought(said) == budget
    assert said["legato"] == {"warnings": [], "thinking": "cut"}
    assert choice["finish_reason"] == "length"
    assert choice["message"]["reasoning_content"]
    assert choice["message"]["content"]
    assert len(choice["token_ids"]) == CHAT["max_tokens"]
    cap = answer(thinking, thinking_token_budget=CAP)["choices"][0]["token_ids"]
    assert choice["token_ids"][:budget] == cap[:budget], "tokens before a cut stay"


def test_a_stream_says_the_same(thinking: ServerProcess) -> None:
    whole = answer(thinking, thinking_token_budget=BUDGET)
    text = thinking.http.post(
        PATH,
        json={
            **CHAT,
            "thinking_token_budget": BUDGET,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    for name in ("reasoning_content", "content"):
        joined = "".join(delta.get(name) or "" for delta in deltas)
        assert joined == whole["choices"][0]["message"][name]
    assert events[-1]["usage"] == whole["usage"]
    assert events[-1]["legato"]["thinking"] == "cut"


def test_a_budget_of_nothing_begins_with_the_answer(thinking: ServerProcess) -> None:
    said = answer(thinking, thinking_token_budget=0)
    assert "completion_tokens_details" not in said["usage"]
    assert "legato" not in said
    assert "reasoning_content" not in said["choices"][0]["message"]
    assert said["choices"][0]["message"]["content"]


@pytest.mark.parametrize("form", ["schema", "logprobs", "penalty"])
def test_a_budget_beside_what_reads_each_token(thinking: ServerProcess, form: str) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
    fields: dict[str, Any] = {
        "schema": {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": schema},
            },
            "max_tokens": 80,
            "ignore_eos": False,
        },
        "logprobs": {"logprobs": True, "top_logprobs": 2},
        "penalty": {"repetition_penalty": 1.2},
    }[form]
    said = answer(thinking, thinking_token_budget=BUDGET, **fields)
    choice = said["choices"][0]
    assert num_thought(said) == BUDGET
    if form == "schema":
        assert json.loads(choice["message"]["content"]) == {"a": "b"}
        assert choice["finish_reason"] == "stop"
    if form == "logprobs":
        entries = choice["logprobs"]["content"]
        assert len(entries) == len(choice["token_ids"])
        assert entries[BUDGET]["logprob"] == 0.0, "a given token is certain"


def test_other_apis_hold_it_too(thinking: ServerProcess) -> None:
    body = {key: CHAT[key] for key in ("messages", "max_tokens", "temperature", "ignore_eos")}
    message = thinking.http.post(
        "/v1/messages", json={**body, "thinking": {"type": "enabled", "budget_tokens": BUDGET}}
    ).json()
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert message["legato"] == {"warnings": [], "thinking": "cut"}
    response = thinking.http.post(
        "/v1/responses", json={"input": "Hi", "max_output_tokens": 40, "ignore_eos": True}
    ).json()
    assert response["legato"]["thinking"] == "cut"
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == DEFAULT


def test_the_python_api_holds_it_too(model: Path) -> None:
    llm = LLM(str(model), quantization="none", kv_cache_memory_bytes=2**26, max_model_len=512)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)

    def said(budget: int | None, params: SamplingParams = params) -> Completion:
        options: Any = {"chat_template": TEMPLATE, "thinking_token_budget": budget}
        [done] = llm.chat(CHAT["messages"], params, use_tqdm=False, **options)
        return done.outputs[0]

    free, unlimited, cut, none = (said(budget) for budget in (None, -1, BUDGET, 0))
    assert (free.num_thinking_tokens, free.is_thinking_cut) == (40, False)
    assert unlimited.token_ids == free.token_ids
    assert (cut.num_thinking_tokens, cut.is_thinking_cut) == (BUDGET, True)
    assert cut.token_ids[:BUDGET] == free.token_ids[:BUDGET]
    assert cut.message is not None
    assert cut.message.reasoning
    assert cut.message.content
    assert (none.num_thinking_tokens, none.is_thinking_cut) == (0, False)
    assert none.message is not None
    assert not none.message.reasoning
    with pytest.raises(InvalidRequestError, match="thinking_token_budget must be at least -1"):
        said(-2)
    with pytest.raises(InvalidRequestError, match="wrong type"):
        said(1.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="at least -1"):  # nor if there is no thought
        llm.chat(CHAT["messages"], params, chat_template="Hi", thinking_token_budget=-2)
    assert said(10**40).num_thinking_tokens == 40
    form = StructuredOutputs(regex="[ab]{4}")
    assert len(said(BUDGET, SamplingParams(max_tokens=40, structured_outputs=form)).text) == 4
