"""Fields that have no effect on this model say so in the answer, the header and the log."""

import json
from typing import Any

import anthropic
import httpx
import pytest

from tests.api import chat_templates
from tests.api.launch import MODEL, ServerProcess
from tests.api.servers import TRUSTING, Servers

HI: Any = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"messages": HI, "max_tokens": 3, "temperature": 0}
RESPONSE: dict[str, Any] = {"input": "Hi", "max_output_tokens": 3}
BUDGET = "is not enforced; max_tokens bounds thinking, too"
NO_EFFECT = "has no effect: this model's chat template"
NO_SWITCH = chat_templates.QWEN.replace("enable_thinking", "other")


@pytest.fixture(scope="module")
def thinking(servers: Servers) -> ServerProcess:
    """Its template has marks of reasoning, and a switch for it."""
    return servers.get("--chat-template", chat_templates.QWEN)


def warnings_of(http: httpx.Client, path: str, body: dict[str, Any]) -> list[str]:
    """The warnings of an answer, which are in its header, too."""
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    told: list[str] = answer.json().get("legato", {"warnings": []})["warnings"]
    header = answer.headers.get("Warning", "")
    assert header == (f'299 legato "{"; ".join(told)}"' if told else "")
    return told


def last_events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = http.post(path, json={**body, "stream": True}).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/chat/completions", {**CHAT, "thinking_token_budget": 9},
         [f"thinking_token_budget {BUDGET}"]),
        ("/v1/chat/completions", {**CHAT, "thinking_token_budget": -1}, []),
        ("/v1/chat/completions", {**CHAT, "thinking_token_budget": 0}, []),
        ("/v1/chat/completions",
         {**CHAT, "thinking_token_budget": 9, "enable_thinking": False}, []),
        ("/v1/chat/completions", {**CHAT, "reasoning_effort": "none"}, []),
        ("/v1/chat/completions", {**CHAT, "reasoning_effort": "low"}, []),
        ("/v1/messages", {**CHAT, "thinking": {"type": "enabled", "budget_tokens": 9}},
         [f"thinking.budget_tokens {BUDGET}"]),
        ("/v1/messages", {**CHAT, "thinking": {"type": "disabled"}}, []),
        ("/v1/messages", {**CHAT, "thinking": {"type": "adaptive"}}, []),
    ],
)  # fmt: skip
def test_a_budget_of_a_model_that_thinks(
    thinking: ServerProcess, path: str, body: dict[str, Any], told: list[str]
) -> None:
    assert warnings_of(thinking.http, path, body) == told


def test_a_template_without_a_switch(servers: Servers) -> None:
    trusting = servers.get(*TRUSTING).http
    body = {**CHAT, "chat_template": NO_SWITCH, "reasoning_effort": "none"}
    fields = {"enable_thinking": False, "thinking_token_budget": 0}
    assert warnings_of(trusting, "/v1/chat/completions", {**body, **fields}) == [
        f"thinking_token_budget {BUDGET}",
        f"enable_thinking {NO_EFFECT} cannot switch it off",
        f"reasoning_effort {NO_EFFECT} does not read it",
    ]
    harmony = {**CHAT, "chat_template": chat_templates.HARMONY, "thinking_token_budget": 9}
    assert warnings_of(trusting, "/v1/chat/completions", harmony) == [
        f"thinking_token_budget {BUDGET}"
    ]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions",
         {**CHAT, "thinking_token_budget": 9, "enable_thinking": False, "reasoning_effort": "low"}),
        ("/v1/messages", {**CHAT, "thinking": {"type": "enabled", "budget_tokens": 9},
                          "output_config": {"effort": "high"}}),
        ("/v1/responses", {**RESPONSE, "reasoning": {"effort": "high"}}),
    ],
)  # fmt: skip
def test_a_model_that_never_thinks_holds_every_budget(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    assert warnings_of(http, path, body) == []


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/chat/completions", {**CHAT, "service_tier": "priority"}, ["service_tier"]),
        ("/v1/chat/completions", {**CHAT, "service_tier": "default", "verbosity": "medium"}, []),
        ("/v1/chat/completions", {**CHAT, "service_tier": "flex", "verbosity": "low"},
         ["service_tier", "verbosity"]),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 1, "service_tier": "scale"},
         ["service_tier"]),
        ("/v1/chat/completions", {**CHAT, "store": True, "prediction": {"type": "content"}},
         ["store", "prediction"]),
        ("/v1/chat/completions", {**CHAT, "store": False, "drop_params": True}, []),
        ("/v1/chat/completions", {**CHAT, "num_ctx": 1 << 20, "num_thread": 4, "num_gpu": 99},
         ["num_ctx has no effect; the context has 8192 tokens", "num_thread, num_gpu have no"]),
        ("/v1/responses", {**RESPONSE, "num_ctx": 4096, "keep_alive": "5m", "drop_params": True},
         ["num_ctx has no effect; the context has 8192 tokens", "keep_alive"]),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 1, "num_ctx": 8192}, []),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 1, "keep_alive": "5m", "num_keep": 4},
         ["keep_alive", "num_keep has no effect; a prompt that is too long is refused"]),
        ("/v1/chat/completions",
         {**CHAT, "provider": {"sort": "price"}, "transforms": ["middle-out"]},
         ["provider", "transforms"]),
        ("/v1/responses", {**RESPONSE, "service_tier": "priority", "text": {"verbosity": "high"}},
         ["service_tier", "text.verbosity"]),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 1, "prompt_cache_retention": "24h"},
         ["prompt_cache_retention"]),
        ("/v1/responses", {**RESPONSE, "prompt_cache_retention": "24h"},
         ["prompt_cache_retention"]),
        ("/v1/responses", {**RESPONSE, "prompt_cache_retention": "in_memory"}, []),
        ("/v1/responses", {**RESPONSE, "tools": [{"type": "web_search"}]},
         ["left out tools that this server cannot run: web_search"]),
    ],
)  # fmt: skip
def test_hints_without_effect(
    http: httpx.Client, path: str, body: dict[str, Any], told: list[str]
) -> None:
    warned = warnings_of(http, path, body)
    assert len(warned) == len(told)
    assert all(text.startswith(start) for text, start in zip(warned, told, strict=True))


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/chat/completions", "service_tier", "gold"),
        ("/v1/chat/completions", "verbosity", "chatty"),
        ("/v1/chat/completions", "prompt_cache_retention", "a year"),
        ("/v1/responses", "service_tier", "gold"),
        ("/v1/messages", "service_tier", "priority"),
    ],
)
def test_an_unknown_value_of_a_hint(http: httpx.Client, path: str, field: str, value: str) -> None:
    body = RESPONSE if path == "/v1/responses" else CHAT
    answer = http.post(path, json={**body, field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{field}: ")


def test_a_chat_says_its_tier_and_a_response_what_it_was_asked(http: httpx.Client) -> None:
    chat = http.post("/v1/chat/completions", json={**CHAT, "service_tier": "flex"}).json()
    assert chat["service_tier"] == "default"
    asked = {**RESPONSE, "prompt_cache_retention": "24h", "text": {"verbosity": "high"}}
    response = http.post("/v1/responses", json=asked).json()
    assert response["prompt_cache_retention"] == "24h"
    assert response["text"]["verbosity"] == "high"
    assert response["service_tier"] == "default"


def test_the_end_of_a_stream_has_the_warnings(thinking: ServerProcess) -> None:
    http, expected = thinking.http, [f"thinking_token_budget {BUDGET}"]
    body = {**CHAT, "thinking_token_budget": 9}
    for options in ({}, {"stream_options": {"include_usage": True}}):
        *others, last = last_events(http, "/v1/chat/completions", {**body, **options})
        assert last["legato"]["warnings"] == expected
        assert not any("legato" in event for event in others)
    *_, last = last_events(http, "/v1/responses", {**RESPONSE, "service_tier": "flex"})
    assert last["response"]["legato"]["warnings"][0].startswith("service_tier ")
    *_, delta, stop = last_events(
        http, "/v1/messages", {**CHAT, "thinking": {"type": "enabled", "budget_tokens": 9}}
    )
    assert stop["type"] == "message_stop"
    assert delta["legato"]["warnings"] == [f"thinking.budget_tokens {BUDGET}"]


def test_the_clients_keep_the_warnings(thinking: ServerProcess) -> None:
    claude = anthropic.Anthropic(base_url=thinking.url, api_key="none", max_retries=0)
    with claude.messages.stream(
        model=MODEL, messages=HI, max_tokens=3, thinking={"type": "enabled", "budget_tokens": 9}
    ) as stream:
        message = stream.get_final_message()
    assert message.model_extra is not None
    assert message.model_extra["legato"]["warnings"] == [f"thinking.budget_tokens {BUDGET}"]
    client = thinking.openai()
    tier: Any = {"service_tier": "priority"}
    with client.responses.stream(model=MODEL, input="Hi", max_output_tokens=3, **tier) as events:
        *_, last = events
    *_, chunk = client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=3, stream=True, **tier
    )
    assert last.type == "response.incomplete"
    for answer in (last.response, chunk):
        assert answer.model_extra is not None
        assert answer.model_extra["legato"]["warnings"][0].startswith("service_tier ")


def test_a_warning_is_one_line_of_log(thinking: ServerProcess) -> None:
    body = {**CHAT, "thinking_token_budget": 9}
    headers = {"X-Request-Id": "the-one-with-a-budget"}
    thinking.http.post("/v1/chat/completions", json=body, headers=headers).raise_for_status()
    [line] = [
        line
        for line in thinking.log.read_text().splitlines()
        if "thinking_token_budget" in line and "the-one-with-a-budget" in line
    ]
    assert line.endswith(f": thinking_token_budget {BUDGET} [the-one-with-a-budget]")


@pytest.mark.parametrize("place", [(), ("function",)])
def test_an_unknown_key_of_a_tool_is_refused_by_name(
    http: httpx.Client, place: tuple[str, ...]
) -> None:
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
    (tool["function"] if place else tool)["frobnicate"] = 1
    answer = http.post("/v1/chat/completions", json={**CHAT, "tools": [tool]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == ".".join(("tools", "0", *place, "frobnicate"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 1}),
        ("/v1/messages", {"messages": HI, "max_tokens": 1}),
    ],
)
def test_no_cached_block_is_used_without_cache_prompt(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    words = "one two three " * 40
    name = next(iter(body))
    long = words if isinstance(body[name], str) else [{"role": "user", "content": words}]

    def num_cached(**fields: Any) -> int:
        usage = http.post(path, json={**body, name: long, **fields}).json()["usage"]
        if "cache_read_input_tokens" in usage:
            return int(usage["cache_read_input_tokens"])
        details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
        return int(details["cached_tokens"])

    num_cached()
    assert num_cached(cache_prompt=True) > 0
    assert num_cached(cache_prompt=False) == 0
    assert num_cached(cache_prompt=False) == 0
    assert num_cached() > 0


def test_the_first_event_of_a_message_counts_the_cache(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "four five six " * 40}], "max_tokens": 2}
    for _ in range(2):
        start, *_, end, _ = last_events(http, "/v1/messages", body)
        assert start["type"] == "message_start"
        usage = start["message"]["usage"]
        assert usage == {**end["usage"], "output_tokens": 0}
        assert start["message"]["content"] == []
        assert start["message"]["stop_reason"] is None
    assert usage["cache_read_input_tokens"] > 0
