"""What asks for nothing is taken, and what would ask for something is refused by its name."""

from typing import Any

import httpx
import openai
import pytest

from tests.api.launch import MODEL

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}
PLAIN = {"prompt": "Hi", "max_tokens": 3, "temperature": 0}

HINTS: dict[str, Any] = {
    "user": "somebody",
    "safety_identifier": "somebody",
    "metadata": {"a": "b"},
    "service_tier": "flex",
    "prompt_cache_key": "a key",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "auto"},
    "verbosity": "low",
    "spaces_between_special_tokens": True,
    "cache_prompt": False,
    "id_slot": -1,
    "timings_per_token": True,
    "session_id": "a session",
    "request_id": "a request",
    "rid": "a request",
    "stream_interval": 4,
}
OFF: dict[str, Any] = {
    "n": 1,
    "stop": [],
    "stop_token_ids": [],
    "logit_bias": {},
    "bad_words": [],
    "store": False,
    "stream": False,
    "stream_options": {"include_usage": False},
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "truncation_side": "left",
    "return_tokens_as_token_ids": False,
    "return_token_ids": False,
    "no_stop_trim": False,
    "return_hidden_states": False,
    "include_stop_str_in_output": False,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "priority": 0,
}
NULL = dict.fromkeys(
    [
        *("allowed_token_ids", "truncate_prompt_tokens", "stream_options", "documents", "audio"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        *(
            "mm_processor_kwargs",
            "prediction",
            "web_search_options",
            "kv_transfer_params",
            "suffix",
        ),
        *("moderation", "functions", "function_call", "logit_bias", "seed", "best_of", "n"),
    ]
)
OF_CHAT: dict[str, Any] = {
    "echo": False,
    "logprobs": False,
    "top_logprobs": 0,
    "documents": [],
    "mm_processor_kwargs": {},
    "modalities": ["text"],
    "add_generation_prompt": True,
    "include_reasoning": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
}
OF_PLAIN: dict[str, Any] = {"echo": False, "logprobs": False, "best_of": 1, "suffix": ""}


@pytest.mark.parametrize(
    ("path", "body", "own"),
    [("/v1/chat/completions", CHAT, OF_CHAT), ("/v1/completions", PLAIN, OF_PLAIN)],
)
def test_what_asks_for_nothing_changes_nothing(
    http: httpx.Client, path: str, body: dict[str, Any], own: dict[str, Any]
) -> None:
    plain = http.post(path, json=body).json()["choices"]
    for lenient in ({**HINTS, **OFF, **own}, NULL):
        answer = http.post(path, json={**body, **lenient})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == plain


def test_one_of_n_is_as_good_as_n(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={**PLAIN, "n": 2, "best_of": 1})
    assert len(answer.json()["choices"]) == 2


def test_the_openai_client_sends_hints(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=1,
        store=False,
        service_tier="priority",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        safety_identifier="s",
        verbosity="high",
    )
    assert completion.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("path", "body", "asks"),
    [
        *(
            (path, body, asks)
            for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", PLAIN))
            for asks in (
                {"use_beam_search": True},
                {"length_penalty": 0.5},
                {"early_stopping": True},
                {"truncation_side": "right"},
                {"no_stop_trim": True},
                {"return_hidden_states": True},
                {"stream_options": {"include_usage": True}},
            )
        ),
        ("/v1/chat/completions", CHAT, {"echo": True}),
        ("/v1/chat/completions", CHAT, {"include_reasoning": False}),
        ("/v1/chat/completions", CHAT, {"separate_reasoning": False}),
        ("/v1/chat/completions", CHAT, {"stream_reasoning": False}),
        ("/v1/chat/completions", CHAT, {"documents": [{"title": "a", "text": "b"}]}),
        ("/v1/chat/completions", CHAT, {"web_search_options": {}}),
        ("/v1/completions", PLAIN, {"logprobs": True}),
        ("/v1/completions", PLAIN, {"suffix": "."}),
        ("/v1/completions", PLAIN, {"n": 2, "best_of": 3}),
    ],
)
def test_what_asks_for_something_is_refused_by_its_name(
    http: httpx.Client, path: str, body: dict[str, Any], asks: dict[str, Any]
) -> None:
    answer = http.post(path, json={**body, **asks})
    assert answer.status_code == 400
    *_, name = asks
    assert answer.json()["error"]["param"] == name


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", PLAIN)]
)
def test_a_field_of_a_transfer_that_nobody_knows_is_refused_by_its_name(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answer = http.post(path, json={**body, "kv_transfer_params": {"a": 1}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "kv_transfer_params.a"


@pytest.mark.parametrize(
    ("sent", "meant"),
    [("max_token", "max_tokens"), ("logit_bais", "logit_bias"), ("frobnicate", None)],
)
def test_a_slip_is_told_what_was_meant(http: httpx.Client, sent: str, meant: str | None) -> None:
    error = http.post("/v1/completions", json={**PLAIN, sent: 1}).json()["error"]
    assert (error["param"], error["code"]) == (sent, "unsupported_parameter")
    hint = "" if meant is None else f"; did you mean {meant}?"
    assert error["message"] == f"{sent} is not supported{hint}"
