"""Drafts change when a token comes, never which one: greedy, drawn, penalized, beside others."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato import StructuredOutputs
from legato.executor import constraint, sequences
from tests.executor.backends import EXACT, NATIVE, Backend, params
from tests.executor.by_hand import Stream, prompt, run_by_hand
from tests.model.random_models import VOCAB_SIZE
from tests.profiles import examples

NUM_TOKENS = 24
NUM_DRAFTS = 5

ENDLESS = "([A-Z]{2}[0-9])*"
DRAWN = {"temperature": 1.0, "seed": 3}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 2, "prompt_logprobs": 1},
    "drawn": DRAWN | {"logprobs": 1},
    "filtered": DRAWN | {"top_p": 0.9, "top_k": 30},
    "penalized": {"repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.6},
    "penalized_and_drawn": DRAWN | {"frequency_penalty": 1.2, "repetition_penalty": 0.8},
    # Token 2 would end it, and is likely.
    "limited": DRAWN
    | {"logprobs": 1}
    | {
        "allowed_token_ids": tuple(range(0, VOCAB_SIZE, 2)),
        "bad_words_token_ids": tuple((a, b) for a in range(VOCAB_SIZE) for b in range(0, 20, 2)),
    },
    "constrained": DRAWN | {"logprobs": 1, "structured_outputs": StructuredOutputs(regex=ENDLESS)},
    "not_yet_to_end": DRAWN | {"min_tokens": 11, "logit_bias": {2: 5.0}},
}
"""What each of the requests asks for."""

# A row of a product is rounded in the same way here, however many rows there are.
on_exact_backends = pytest.mark.parametrize("backend", params([EXACT, *NATIVE]))


@cache
def prompt_of(name: str) -> list[int]:
    index = list(ASKED).index(name)
    return prompt(20 + 7 * index, salt=index)


@cache
def alone(backend: Backend, name: str) -> Stream:
    """What a request gets alone and without drafts."""
    hand, _ = run_by_hand(backend)
    stream = hand.add(name, prompt_of(name), max_tokens=NUM_TOKENS, **ASKED[name])
    hand.finish()
    return stream


@pytest.fixture(autouse=True)
def masks_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks after drafts are waited for, however busy the machine is."""
    monkeypatch.setattr(constraint, "_SLOW_S", 30.0)
    monkeypatch.setattr(sequences, "_MASK_WAIT_S", 30.0)


def wrong(tokens: list[int]) -> list[int]:
    return [(token + 1) % VOCAB_SIZE for token in tokens]


DRAFTS: dict[str, tuple[Callable[[list[int]], list[int]], int]] = {
    "right": (lambda tokens: tokens, NUM_DRAFTS + 1),
    "wrong": (wrong, 1),
    "right at first": (lambda tokens: tokens[:2] + wrong(tokens[2:]), 3),
    "right again at last": (lambda tokens: wrong(tokens[:1]) + tokens[1:], 1),
}
"""Key what drafts are, value what makes them of the tokens that will come, and the tokens of a step
that they make."""


@on_exact_backends
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_alone(backend: Backend, name: str, drafts: str) -> None:
    expected = alone(backend, name)
    hand, _ = run_by_hand(backend)
    stream = hand.add(name, prompt_of(name), max_tokens=NUM_TOKENS, **ASKED[name])
    draft, num_gained = DRAFTS[drafts]
    hand.step(**{name: len(prompt_of(name))})
    while stream.num_left > NUM_DRAFTS:
        before = len(stream.output)
        coming = expected.output[before : before + NUM_DRAFTS]
        hand.step({name: draft(coming)}, **{name: 1})
        assert len(stream.output) == before + num_gained
    hand.finish()
    assert_same(stream, expected)


def test_a_prompt_and_drafts_behind_it() -> None:
    """Drafts may come with the last chunk of a prompt."""
    expected = alone(EXACT, "greedy")
    hand, _ = run_by_hand(EXACT)
    stream = hand.add("greedy", prompt_of("greedy"), max_tokens=NUM_TOKENS, **ASKED["greedy"])
    hand.step(greedy=8)
    hand.step({"greedy": expected.output[:3]}, greedy=12)
    assert len(stream.output) == 4
    hand.finish()
    assert_same(stream, expected)


@on_exact_backends
@given(data=st.data())
@examples(20)
def test_in_a_mixed_batch(backend: Backend, data: st.DataObject) -> None:
    """Prefill chunks, decodes and verifications side by side; some steps fail."""
    hand, model = run_by_hand(backend)
    names = data.draw(st.sets(st.sampled_from(sorted(ASKED)), min_size=1), "requests")
    for name in sorted(names):
        hand.add(name, prompt_of(name), max_tokens=NUM_TOKENS, **ASKED[name])
    for _ in range(data.draw(st.integers(1, 12), "steps")):
        counts: dict[str, int] = {}
        drafts: dict[str, list[int]] = {}
        for name in sorted(names):
            stream = hand.streams[name]
            num_known = len(stream.tokens) - stream.num_computed
            count = data.draw(st.integers(0, num_known), name)
            if not count or not stream.num_left:
                continue
            counts[name] = count
            if count == num_known:
                drafts[name] = data.draw(draft_of(alone(backend, name), stream), f"{name}'s drafts")
        if not counts:
            continue
        if data.draw(st.booleans(), "fails"):
            model.fails = True
            with pytest.raises(RuntimeError):
                hand.step(drafts, **counts)
            model.fails = False
            drafts = {name: ids for name, ids in drafts.items() if data.draw(st.booleans())}
        hand.step(drafts, **counts)
    hand.finish()
    for name in names:
        assert_same(hand.streams[name], alone(backend, name))


def draft_of(expected: Stream, stream: Stream) -> st.SearchStrategy[list[int]]:
    """As many right tokens as may be, and others behind them."""
    most = min(NUM_DRAFTS, stream.num_left - 1)
    coming = expected.output[len(stream.output) :]
    any_tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=most)
    return st.tuples(st.integers(0, most), any_tokens).map(
        lambda drawn: [*coming[: drawn[0]], *drawn[1]][:most]
    )


def assert_same(stream: Stream, expected: Stream) -> None:
    assert stream.output == expected.output
    for name in ("logprobs", "prompt_logprobs"):
        scores, others = getattr(stream, name), getattr(expected, name)
        assert [s.token_id for s in scores] == [s.token_id for s in others]
        assert [s.logprob for s in scores] == pytest.approx(
            [s.logprob for s in others], abs=EXACT.tolerance
        )


@on_exact_backends
def test_nothing_may_follow_a_draft_that_was_right(backend: Backend) -> None:
    """A request that may have no more tokens has all that came before, drafted or not."""
    expected = alone(backend, "greedy").output
    bad = {"bad_words_token_ids": tuple((expected[2], other) for other in range(VOCAB_SIZE))}
    streams: list[Stream] = []
    for drafts in ({}, {"a": expected[1:4]}):
        hand, _ = run_by_hand(backend)
        stream = hand.add("a", prompt_of("greedy"), max_tokens=NUM_TOKENS, logprobs=0, **bad)
        streams.append(stream)
        hand.step(a=len(prompt_of("greedy")))
        hand.step(drafts, a=1)
        assert len(stream.output) == (3 if drafts else 2)
        assert not stream.error
        hand.finish()
    usual, drafted = streams
    assert drafted.output == usual.output == expected[:3]
    assert drafted.error == usual.error != ""
    assert [s.token_id for s in drafted.logprobs] == expected[:3]
