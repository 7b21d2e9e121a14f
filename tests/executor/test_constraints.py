"""Constrained rows: what may come, where they end, and what they leave to others."""

import re
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from llguidance import LLParserLimits

from legato import StructuredOutputs
from legato.executor.mask_thread import MaskThread, Wanted
from legato.grammar import compiled
from tests.executor.backends import EXACT
from tests.executor.by_hand import EOS, VOCABULARY, ByHand, Stream, prompt, run_by_hand, text_of

WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.3, "seed": 5},
    {"temperature": 1.0, "seed": 6, "top_k": 20, "frequency_penalty": 1.0},
)


def add(hand: ByHand, name: str, regex: str, **params: Any) -> Stream:
    form = StructuredOutputs(regex=regex)
    return hand.add(name, prompt(20), **{"structured_outputs": form, "max_tokens": 40, **params})


def alone(regex: str, **params: Any) -> Stream:
    hand, _ = run_by_hand(EXACT)
    stream = add(hand, "it", regex, **params)
    hand.finish()
    return stream


@pytest.mark.parametrize("params", WAYS)
@pytest.mark.parametrize("regex", ["[a-c]{7}", "(AB|BA){3}", "x(yz){2,4}Q", "[0-9]+"])
def test_every_output_is_of_the_form(regex: str, params: dict[str, Any]) -> None:
    stream = alone(regex, **params)
    assert re.fullmatch(regex, text_of(stream).partition("<eos>")[0])


def test_it_ends_where_nothing_may_follow_without_a_token_for_it() -> None:
    stream = alone("[ab]{5}", min_tokens=20)
    assert stream.is_complete
    assert len(stream.output) == 5


def test_the_end_comes_only_where_the_form_may_end() -> None:
    likely = {"logit_bias": {EOS: 100.0}, "temperature": 1.0, "max_tokens": 30}
    assert text_of(alone("[ab]{4,9}c?", **likely))[4:9] == "<eos>"
    stopped = alone("[ab]{4,9}", **likely, stop_token_ids=(7,))
    assert 7 not in stopped.output[:4]
    (end,) = [i for i in range(90) if VOCABULARY.token_bytes(i) == b"("]
    assert alone("[ab]{4,9}", logit_bias={end: 100.0}, stop_token_ids=(end,)).output[4] == end


def test_padding_is_no_token() -> None:
    likely = {"logit_bias": dict.fromkeys(range(90, 100), 100.0)}
    assert max(alone("[^!]{30}", **likely).output) < VOCABULARY.num_ids


def test_log_probabilities_are_of_the_model_itself() -> None:
    stream = alone("[ab]{5}", logprobs=3)
    assert min(score.rank for score in stream.logprobs) >= 1
    assert any(score.rank > 3 for score in stream.logprobs), "what was likelier was forbidden"


def test_neighbours_change_nothing() -> None:
    expected = {i: alone("([A-Z]{2}[0-9])*", max_tokens=12, **WAYS[i]).output for i in range(3)}
    hand, _ = run_by_hand(EXACT)
    free = hand.add("free", prompt(30, salt=1), max_tokens=12)
    streams = [add(hand, f"s{i}", "([A-Z]{2}[0-9])*", max_tokens=12, **WAYS[i]) for i in range(3)]
    hand.finish()
    assert {i: stream.output for i, stream in enumerate(streams)} == expected
    by_itself, _ = run_by_hand(EXACT)
    same = by_itself.add("free", prompt(30, salt=1), max_tokens=12)
    by_itself.finish()
    assert free.output == same.output


def test_a_failed_step_and_a_preemption_leave_no_trace() -> None:
    expected = alone("([A-Z]{2}[0-9])*", max_tokens=12)
    hand, model = run_by_hand(EXACT)
    stream = add(hand, "it", "([A-Z]{2}[0-9])*", max_tokens=12)
    for num_tokens in (20, 1, 1, 1):
        model.fails = True
        with pytest.raises(RuntimeError):
            hand.step(it=num_tokens)
        model.fails = False
        hand.step(it=num_tokens)
    hand.preempt("it")
    hand.finish()
    assert stream.output == expected.output


def test_a_late_mask_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    make = MaskThread._make

    def late(self: MaskThread, wanted: Sequence[Wanted]) -> None:
        assert may_go_on.wait(60)
        make(self, wanted)

    expected = alone("[A-Z]+", max_tokens=5, prompt_logprobs=1)
    monkeypatch.setattr(MaskThread, "_make", late)
    hand, _ = run_by_hand(EXACT)
    stream = add(hand, "it", "[A-Z]+", max_tokens=5, prompt_logprobs=1)
    free = hand.add("free", prompt(10, salt=1), max_tokens=8)
    hand.step(it=20, free=10)
    hand.step(it=1, free=1)
    assert (len(stream.output), len(free.output)) == (0, 2)
    may_go_on.set()
    hand.finish()
    assert stream.output == expected.output
    assert len(stream.prompt_logprobs) == 19


def test_a_grammar_that_takes_too_much_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        compiled, "_LIMITS", LLParserLimits(max_lexer_states=30, verbose_errors=False)
    )
    hand, _ = run_by_hand(EXACT)
    hard = add(hand, "hard", "[a-z]{60}")
    other = add(hand, "other", "[ab]+", max_tokens=30)
    hand.finish()
    assert "takes too much" in hard.error
    assert len(other.output) == 30
    assert not other.error
