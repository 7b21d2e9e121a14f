"""Speculation changes when a token comes, never which one: the real model in fp32."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato import LLM, SamplingParams, StructuredOutputs
from legato.core.outputs import FinishReason, TokenLogprobs
from legato.core.step_record import StepRecord
from legato.language.completion import Completion
from tests.profiles import examples

NEAR_TIE = 1e-3
"""Where the best two logits are closer than this, rounding may pick either."""
TOLERANCE = 1e-3
"""Of log probabilities: a row is rounded otherwise among others."""
NUM_TOKENS = 16
BLOCK_SIZE = 4
BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 4
MAX_MODEL_LEN = 512

LOOP = "for i in range(10):\n    print(i)\nfor j in range(10):\n    print(j)\nfor k in range("
PROMPTS = (
    LOOP,
    "one two three four one two three four one two three four one two",
    "The cat sat on the mat. The dog sat on the rug. The cat sat on the",
    '{"name": "Ann", "age": 30}\n{"name": "Bob", "age": 31}\n{"name": "Cid",',
    "Once upon a time",
    "The cat sat on the mat. The dog sat on the rug. The bird flew to the",
)
"""The tokens of most come again: their drafts are right for a while, and then wrong."""

DRAWN = {"temperature": 0.7}
PERSON = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "age": '
PERSON += '{"type": "integer"}}, "required": ["name", "age"], "additionalProperties": false}'
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, scored": {"logprobs": 3, "prompt_logprobs": 2},
    "drawn": DRAWN | {"logprobs": 1},
    "drawn from few": DRAWN | {"top_p": 0.9, "top_k": 20, "min_p": 0.05},
    "hardly drawn": {"temperature": 0.2},
    "penalized": {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "encouraged": DRAWN | {"frequency_penalty": -1.5, "repetition_penalty": 0.9},
    "biased": {"logit_bias": {198: 3.0, 28: 2.0}, "logprobs": 0},
    "without words": {"bad_words": ("three", "mat", "print", "age")},
    "of few tokens": DRAWN | {"allowed_token_ids": tuple(range(0, 49000, 3))},
    "until a string": {"stop": ("the", "\n", "four one"), "logprobs": 0},
    "until a string that is kept": {"stop": ("at", "4"), "include_stop_str_in_output": True},
    "until a token": {"stop_token_ids": (198, 30, 28), "min_tokens": 3},
    "long enough": {"stop_token_ids": (198, 28), "stop": ("a", "e"), "min_tokens": 13},
    "endless": {"ignore_eos": True},
    "soon to end": {"logit_bias": {2: 9.0, 0: 9.0}},
    "short": {"max_tokens": 1},
    "not long": {"max_tokens": 7, "prompt_logprobs": 0},
    "twice": {"n": 2, "temperature": 0.5, "logprobs": 0},
    "a number": {"structured_outputs": StructuredOutputs(regex="( [0-9]{2})+;"), "logprobs": 0},
    "words": DRAWN | {"structured_outputs": StructuredOutputs(regex="((the|cat|mat) )*end")},
    "a person": {"structured_outputs": StructuredOutputs(json=PERSON), "max_tokens": 24},
}
"""What each kind of request asks for; greedy and of `NUM_TOKENS` tokens where it says nothing."""

Request = tuple[int, str, int | None]
"""Number of the prompt, kind, and seed; without one, the front end draws it."""


@pytest.fixture(scope="module")
def plain() -> LLM:
    return _llm(speculative="off", num_blocks=2048)


@pytest.fixture(scope="module")
def drafting() -> LLM:
    llm = _llm(speculative=5, num_blocks=2048)
    llm._engine.set_recording(is_on=True)
    return llm


@pytest.fixture(scope="module")
def cramped() -> LLM:
    """Its cache holds the longest request, and not what several come to."""
    llm = _llm(speculative=5, num_blocks=40, admission_optimism=1.0)
    llm._engine.set_recording(is_on=True)
    return llm


def _llm(*, num_blocks: int, **settings: Any) -> LLM:
    return LLM(
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_model_len=min(MAX_MODEL_LEN, num_blocks * BLOCK_SIZE),
        kv_cache_memory_bytes=num_blocks * BLOCK_SIZE * BYTES_PER_TOKEN,
        max_num_batched_tokens=128,
        max_num_seqs=24,
        **settings,
    )


def complete(llm: LLM, requests: Sequence[Request]) -> list[list[Completion]]:
    random.seed(0)  # what the front end draws for those without a seed
    usual = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
    params = [SamplingParams(**{**usual, "seed": s, **ASKED[kind]}) for _, kind, s in requests]
    prompts = [PROMPTS[number] for number, _, _ in requests]
    return [result.outputs for result in llm.generate(prompts, params, use_tqdm=False)]


def assert_same(got: list[list[Completion]], expected: list[list[Completion]]) -> None:
    for mine, other in zip(got, expected, strict=True):
        for completion, usual in zip(mine, other, strict=True):
            assert completion.token_ids == usual.token_ids
            assert completion.text == usual.text
            assert completion.finish_reason == usual.finish_reason
            assert completion.stop_reason == usual.stop_reason
            assert_same_scores(completion.logprobs, usual.logprobs)
            assert_same_scores(completion.prompt_logprobs, usual.prompt_logprobs)


def assert_same_scores(
    got: list[TokenLogprobs] | None, expected: list[TokenLogprobs] | None
) -> None:
    assert (got is None) == (expected is None)
    for mine, other in zip(got or (), expected or (), strict=True):
        assert mine.token_id == other.token_id
        assert mine.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
        assert [p for _, p in mine.top] == pytest.approx([p for _, p in other.top], abs=TOLERANCE)


def count_drafts(llm: LLM) -> tuple[int, int]:
    """Drafted and accepted since the last time."""
    steps = [record for record in llm._engine.take_records() if isinstance(record, StepRecord)]
    return sum(s.num_draft_tokens for s in steps), sum(s.num_accepted_tokens for s in steps)


def test_each_kind_of_request(plain: LLM, drafting: LLM) -> None:
    """All of them at once, and again when what comes of them is drafted."""
    requests: list[Request] = [(i % len(PROMPTS), kind, i) for i, kind in enumerate(ASKED)]
    expected = complete(plain, requests)
    reasons = Counter(one.finish_reason for outputs in expected for one in outputs)
    assert min(reasons[FinishReason.LENGTH], reasons[FinishReason.STOP]) >= 5
    count_drafts(drafting)
    assert_same(complete(drafting, requests), expected)
    drafted, accepted = count_drafts(drafting)
    print(f"{accepted} of {drafted} drafts were right")
    assert accepted >= 30
    assert drafted - accepted >= 30
    assert_same(complete(drafting, requests), expected)
    drafted, accepted = count_drafts(drafting)
    print(f"{accepted} of {drafted} drafts were right when it came again")
    assert accepted >= 100
    assert drafting.stats.num_prefix_cache_hits > 0


def test_with_too_little_memory(plain: LLM, cramped: LLM) -> None:
    requests: list[Request] = [(i, "endless", i) for i in range(len(PROMPTS))]
    expected = complete(plain, requests)
    for _ in range(2):
        assert_same(complete(cramped, requests), expected)
    drafted, accepted = count_drafts(cramped)
    print(f"{accepted} of {drafted} drafts were right, {cramped.stats.num_preemptions} preemptions")
    assert cramped.stats.num_preemptions > 0
    assert accepted >= 30
    assert drafted - accepted >= 30


@given(
    requests=st.lists(
        st.tuples(
            st.integers(0, len(PROMPTS) - 1),
            st.sampled_from(sorted(ASKED)),
            st.none() | st.integers(0, 3),
        ),
        min_size=1,
        max_size=5,
    ),
    is_cramped=st.booleans(),
)
@examples(3)
def test_any_requests_beside_any_others(
    plain: LLM, drafting: LLM, cramped: LLM, requests: list[Request], is_cramped: bool
) -> None:
    assert_same(complete(cramped if is_cramped else drafting, requests), complete(plain, requests))
