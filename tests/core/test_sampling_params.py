from typing import Any

import msgspec
import pytest

from legato import SamplingParams
from legato.core.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, 129]),
        ("temperature", [-0.1, float("nan"), float("inf"), 10**400]),
        ("top_p", [0.0, 1.1, float("nan")]),
        ("top_k", [-2, 2**31]),
        ("min_p", [-0.1, 1.1]),
        ("repetition_penalty", [0.0, 0.009, 101.0, float("inf"), float("nan")]),
        ("presence_penalty", [-2.1, 2.1]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("logit_bias", [{1: 101.0}, {1: float("nan")}, dict.fromkeys(range(1025), 0.0)]),
        ("seed", [2**63, -(2**63) - 1]),
        ("max_tokens", [0]),
        ("min_tokens", [-1, 17]),
        ("stop", [[""], ["x"] * 65, ["x" * 4097], ["x" * 2049] * 2]),
        ("stop_token_ids", [[1] * 65]),
        ("allowed_token_ids", [[], range(2**14 + 1)]),
        ("bad_words", [[""], [" "], ["x"] * 1025, ["x" * 2**13] * 3]),
        ("bad_words_token_ids", [[[]], [range(2**15 + 1)]]),
        ("truncate_prompt_tokens", [0, -2]),
        ("logprobs", [-1, 21]),
        ("prompt_logprobs", [-1, 21]),
    ],
)
def test_values_out_of_range_name_their_field(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequestError) as refusal:
            SamplingParams(**{field: value})
        assert refusal.value.param == field


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_a_long_list_is_refused_without_its_entries(field: str) -> None:
    long: dict[str, Any] = {field: ["x"] * 10_000 + [""]}
    with pytest.raises(InvalidRequestError, match="has over") as refusal:
        SamplingParams(**long)
    assert len(str(refusal.value)) < 100


@pytest.mark.parametrize(
    ("given", "stored"), [("abc", ("abc",)), (["a", "b"], ("a", "b")), (None, ()), ((), ())]
)
def test_stop_may_come_as_in_vllm(given: Any, stored: tuple[str, ...]) -> None:
    assert SamplingParams(stop=given).stop == stored


def test_stop_token_ids_may_be_a_list() -> None:
    params = SamplingParams(stop_token_ids=[1, 2])  # type: ignore[arg-type]
    assert params.stop_token_ids == (1, 2)
    assert msgspec.structs.replace(params, n=2).stop_token_ids == (1, 2)


def test_a_field_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_tokens_that_are_allowed_or_bad_may_be_lists() -> None:
    params = SamplingParams(allowed_token_ids=[3, 1, 3], bad_words_token_ids=[[1, 2]])  # type: ignore[arg-type]
    assert params.allowed_token_ids == (3, 1)
    assert params.bad_words_token_ids == ((1, 2),)
    assert params.needs_values
    assert not SamplingParams(allowed_token_ids=(1,)).needs_values
