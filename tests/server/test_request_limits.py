"""Each number that bounds a request: what it allows is served, and one more is refused."""

from typing import Any

import httpx
import pytest
from scripts.api_reference import limits

from legato.core import sampling_params, slo


def _entries(number: int) -> dict[str, int]:
    return {str(token): 1 for token in range(number)}


def _chars(number: int) -> list[str]:
    """Texts of so many characters in all."""
    return ["x" * (number - 1000), "y" * 1000]


_N, _STOP = sampling_params.MAX_N, sampling_params.MAX_STOP
_LOGPROBS, _BIAS = sampling_params.MAX_LOGPROBS, sampling_params.MAX_LOGIT_BIAS
_PENALTY, _STOP_CHARS = sampling_params.MAX_REPETITION_PENALTY, sampling_params.MAX_STOP_CHARS
_SEED, _TOP_K = sampling_params.SEED_LIMIT, sampling_params.TOP_K_LIMIT
_PRIORITY, _SALT = slo.MAX_PRIORITY, slo.MAX_CACHE_SALT

CASES: list[tuple[str, str, Any, Any]] = [
    # The limit, the field, what is allowed, and what is beyond.
    ("MAX_LOGPROBS", "logprobs", _LOGPROBS, _LOGPROBS + 1),
    ("MAX_LOGPROBS", "prompt_logprobs", _LOGPROBS, _LOGPROBS + 1),
    ("MAX_LOGIT_BIAS", "logit_bias", _entries(_BIAS), _entries(_BIAS + 1)),
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


def test_every_limit_is_tried() -> None:
    assert {limit for limit, *_ in CASES} == limits.constants().keys()
