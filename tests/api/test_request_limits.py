"""Each number that bounds a request: what it allows is served, and one more is refused."""

from typing import Any

import httpx
import pytest
from scripts.api_reference import limits

from legato.api.limits import (
    MAX_ANSWER_BYTES,
    MAX_DETOKENIZED,
    MAX_FIELDS,
    MAX_JSON_VALUES,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_VALUE_CHARS,
    MAX_NAME_CHARS,
    MAX_ROLE_CHARS,
)
from legato.checkpoint.source import resolve_source
from legato.core import sampling_params, slo
from legato.core.config import DEFAULT_MODEL
from legato.language.tokenizer.tokenizer import load_tokenizer


def _entries(number: int) -> dict[str, int]:
    return {str(token): 1 for token in range(number)}


def _chars(number: int) -> list[str]:
    """Texts of so many characters in all."""
    return ["x" * (number - 1000), "y" * 1000]


_N, _STOP = sampling_params.MAX_N, sampling_params.MAX_STOP
_LOGPROBS, _BIAS = sampling_params.MAX_LOGPROBS, sampling_params.MAX_LOGIT_BIAS
_ALLOWED = sampling_params.MAX_ALLOWED_TOKEN_IDS
_BAD, _BAD_CHARS = sampling_params.MAX_BAD_WORDS, sampling_params.MAX_BAD_WORDS_CHARS
_PENALTY, _STOP_CHARS = sampling_params.MAX_REPETITION_PENALTY, sampling_params.MAX_STOP_CHARS
_SEED, _TOP_K = sampling_params.SEED_LIMIT, sampling_params.TOP_K_LIMIT
_PRIORITY, _SALT = slo.MAX_PRIORITY, slo.MAX_CACHE_SALT
_KEY, _VALUE = MAX_METADATA_KEY_CHARS, MAX_METADATA_VALUE_CHARS

CASES: list[tuple[str, str, Any, Any]] = [
    # The limit, the field, what is allowed, and what is beyond.
    ("MAX_LOGPROBS", "logprobs", _LOGPROBS, _LOGPROBS + 1),
    ("MAX_LOGPROBS", "prompt_logprobs", _LOGPROBS, _LOGPROBS + 1),
    ("MAX_LOGIT_BIAS", "logit_bias", _entries(_BIAS), _entries(_BIAS + 1)),
    ("MAX_ALLOWED_TOKEN_IDS", "allowed_token_ids", [*range(_ALLOWED)], [*range(_ALLOWED + 1)]),
    ("MAX_BAD_WORDS", "bad_words", ["x"] * _BAD, ["x"] * (_BAD + 1)),
    ("MAX_BAD_WORDS_CHARS", "bad_words", _chars(_BAD_CHARS), _chars(_BAD_CHARS + 1)),
    ("MAX_STOP", "stop", ["x"] * _STOP, ["x"] * (_STOP + 1)),
    ("MAX_STOP", "stop_token_ids", [5] * _STOP, [5] * (_STOP + 1)),
    ("MAX_STOP_CHARS", "stop", _chars(_STOP_CHARS), _chars(_STOP_CHARS + 1)),
    ("MAX_N", "n", _N, _N + 1),
    ("MAX_REPETITION_PENALTY", "repetition_penalty", _PENALTY, _PENALTY + 0.5),
    ("MAX_REPETITION_PENALTY", "repetition_penalty", 1 / _PENALTY, 0.99 / _PENALTY),
    ("SEED_LIMIT", "seed", _SEED - 1, _SEED),
    ("SEED_LIMIT", "seed", -_SEED, -_SEED - 1),
    ("TOP_K_LIMIT", "top_k", _TOP_K - 1, _TOP_K),
    ("MAX_PRIORITY", "priority", _PRIORITY, _PRIORITY + 1),
    ("MAX_PRIORITY", "priority", -_PRIORITY, -_PRIORITY - 1),
    ("MAX_CACHE_SALT", "cache_salt", "x" * _SALT, "x" * (_SALT + 1)),
    ("MAX_NAME_CHARS", "user", "x" * MAX_NAME_CHARS, "x" * (MAX_NAME_CHARS + 1)),
    ("MAX_METADATA_KEY_CHARS", "metadata", {"x" * _KEY: ""}, {"x" * (_KEY + 1): ""}),
    ("MAX_METADATA_VALUE_CHARS", "metadata", {"x": "y" * _VALUE}, {"x": "y" * (_VALUE + 1)}),
]


@pytest.mark.parametrize(("limit", "field", "allowed", "beyond"), CASES)
def test_at_the_limit_and_beyond(
    http: httpx.Client, limit: str, field: str, allowed: Any, beyond: Any
) -> None:
    body = {"prompt": "Hi", "max_tokens": 1, "temperature": 0}
    served = http.post("/v1/completions", json={**body, field: allowed})
    assert served.status_code == 200, f"{limit}: {served.text}"
    refused = http.post("/v1/completions", json={**body, field: beyond})
    assert refused.status_code == 400, limit
    assert refused.json()["error"]["param"].split(".")[0] == field


TRIED_ELSEWHERE = {
    # tests/api/test_large_answers.py
    "MAX_UNREAD_BYTES",
    "MAX_WHOLE_ANSWER_BYTES",
    # tests/api/test_pipelines.py
    "MAX_PIPELINED_BYTES",
    # tests/api/test_text_processes.py
    "KEPT_MEMORY_BYTES",
    "LARGE_BODY_BYTES",
    "MAX_CONTENT_PARTS",
    "MAX_DETOKENIZED",
    "MAX_MESSAGES",
    "MAX_METADATA",
    "MAX_PLAIN_BODY_BYTES",
    "MAX_READERS",
    "MAX_TEMPLATE_CHARS",
    "MAX_TEMPLATE_VARIABLES",
    "READER_MEMORY_BYTES",
    "TEMPLATE_MEMORY_BYTES",
    # tests/api/test_background_runs.py
    "MAX_REPEATED_BYTES",
    "MAX_REPEATED_FIELD_BYTES",
    # tests/api/test_tools.py
    "MAX_TOOLS",
    "MAX_TOOLS_CHARS",
    "MAX_TOOL_CALLS",
    "MAX_TOOL_NAME_CHARS",
    # below
    "MAX_ANSWER_BYTES",
    "MAX_FIELDS",
    "MAX_JSON_VALUES",
    "MAX_LOGPROB_TOKEN_IDS",
    "MAX_ROLE_CHARS",
    "MAX_WAITING_BYTES",
}


def test_every_limit_is_tried() -> None:
    tried = {limit for limit, *_ in CASES}
    assert not tried & TRIED_ELSEWHERE
    assert tried | TRIED_ELSEWHERE == limits.constants().keys()


@pytest.mark.parametrize("more", [0, 1])
def test_listed_tokens_are_bounded(http: httpx.Client, more: int) -> None:
    listed = [*range(sampling_params.MAX_LOGPROB_TOKEN_IDS + more)]
    body = {"prompt": "Hi", "max_tokens": 1, "logprobs": 1, "logprob_token_ids": listed}
    assert http.post("/v1/completions", json=body).status_code == (400 if more else 200)


@pytest.mark.parametrize("more", [0, 1])
def test_roles_are_bounded(http: httpx.Client, more: int) -> None:
    """The default model's template writes roles as they come."""
    role = "r" * (MAX_ROLE_CHARS + more)
    body = {"messages": [{"role": role, "content": "Hi"}], "max_tokens": 1}
    assert http.post("/v1/chat/completions", json=body).status_code == (400 if more else 200)


@pytest.mark.parametrize("more", [0, 1])
def test_values_of_a_body_are_bounded(http: httpx.Client, more: int) -> None:
    """The object and the list are values, too."""
    tokens = [5] * (MAX_JSON_VALUES - 2 + more)
    refusal = http.post("/detokenize", json={"tokens": tokens}).json()["error"]
    assert (refusal["param"] == "tokens") is not bool(more)


@pytest.mark.parametrize("more", [0, 1])
def test_fields_of_an_object_are_bounded(http: httpx.Client, more: int) -> None:
    body = {f"x{i}": 1 for i in range(MAX_FIELDS + more)}
    refusal = http.post("/v1/completions", json=body).json()["error"]
    assert (f"over {MAX_FIELDS}" in refusal["message"]) is bool(more)


def test_an_answer_is_bounded(http: httpx.Client) -> None:
    vocabulary = load_tokenizer(resolve_source(DEFAULT_MODEL)).vocabulary
    lengths = [len(vocabulary.token_bytes(i)) for i in range(vocabulary.num_ids)]
    token_id = lengths.index(max(lengths))
    num_bytes = [
        len(http.post("/detokenize", json={"tokens": [token_id] * count}).content)
        for count in (1, 2)
    ]
    most = MAX_ANSWER_BYTES // (num_bytes[1] - num_bytes[0])
    assert most < MAX_DETOKENIZED, "no answer is as long"
    served = http.post("/detokenize", json={"tokens": [token_id] * (most - 100)})
    assert served.status_code == 200, served.text[:1000]
    refused = http.post("/detokenize", json={"tokens": [token_id] * (most + 100)})
    assert refused.status_code == 400
    assert str(MAX_ANSWER_BYTES) in refused.json()["error"]["message"]
