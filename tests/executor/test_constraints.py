"""Constrained rows: what may come, where they end, and what they leave to others."""

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits

from legato import StructuredOutputs
from legato.core.worker import Worker
from legato.executor import constraint as constraint_module
from legato.executor import sequences
from legato.executor.constraint import Constraint, Masks
from legato.executor.mask_maker import MaskMaker, _Place
from legato.executor.torch_executor import TorchExecutor
from legato.grammar import matcher
from legato.grammar.matcher import Grammar
from tests.executor.backends import EXACT
from tests.executor.by_hand import EOS, VOCABULARY, ByHand, Stream, prompt, run_by_hand, text_of

WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.3, "seed": 5},
    {"temperature": 1.0, "seed": 6, "top_k": 20, "frequency_penalty": 1.0},
)
NAMED: dict[str, dict[str, Any]] = dict(zip(("quick", "failing", "other"), WAYS, strict=True))


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No grammar is slow because the machine is busy, and no job goes on in the next test."""
    workers: list[Worker] = []
    begin = MaskMaker.__init__

    def noted(maker: MaskMaker) -> None:
        begin(maker)
        workers.extend((maker._quick, maker._slow))

    monkeypatch.setattr(MaskMaker, "__init__", noted)
    monkeypatch.setattr(constraint_module, "_SLOW_S", 30.0)
    yield
    for worker in workers:
        if worker._thread is not None:
            worker._thread.shutdown()


class Gate:
    """Holds up masks until they are let through.

    Args:
        holds: whether it holds up a call for the masks of such a place.

    Attributes:
        num_waiting: calls that wait.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, holds: Callable[[_Place], bool] = lambda _: True
    ) -> None:
        self.num_waiting = 0
        self._passes = threading.Semaphore(0)
        self._is_open = False
        compute = MaskMaker._compute

        def gated(maker: MaskMaker, places: Sequence[_Place], masks: Masks) -> None:
            if any(map(holds, places)) and not self._is_open:
                self.num_waiting += 1
                assert self._passes.acquire(timeout=60)
                self.num_waiting -= 1
            compute(maker, places, masks)

        monkeypatch.setattr(MaskMaker, "_compute", gated)

    def let_one_pass(self) -> None:
        self._passes.release()

    def open(self) -> None:
        self._is_open = True
        self._passes.release(100)


def constraint_of(hand: ByHand, name: str) -> Constraint:
    assert isinstance(hand.executor, TorchExecutor)
    constraint = hand.executor._sequences._sequences[name].constraint
    assert constraint is not None
    return constraint


def wait_for_masks(hand: ByHand) -> None:
    ends_s = time.monotonic() + 60
    while any(constraint_of(hand, name).is_in_flight for name in hand.streams):
        assert time.monotonic() < ends_s
        time.sleep(0.001)


def add(hand: ByHand, name: str, regex: str, **params: Any) -> Stream:
    form = StructuredOutputs(regex=regex)
    return hand.add(name, prompt(20), **{"structured_outputs": form, "max_tokens": 40, **params})


def alone(regex: str, **params: Any) -> Stream:
    hand, _ = run_by_hand(EXACT)
    stream = add(hand, "it", regex, **params)
    hand.finish()
    wait_for_masks(hand)  # no other test holds these up
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


def test_a_late_mask_holds_up_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone("[A-Z]+", max_tokens=5, prompt_logprobs=1)
    gate = Gate(monkeypatch)
    hand, _ = run_by_hand(EXACT)
    stream = add(hand, "it", "[A-Z]+", max_tokens=5, prompt_logprobs=1)
    free = hand.add("free", prompt(10, salt=1), max_tokens=8)
    hand.step(it=20, free=10)
    hand.step(it=1, free=1)
    assert (len(stream.output), len(free.output)) == (0, 2)
    gate.open()
    hand.finish()
    assert stream.output == expected.output
    assert len(stream.prompt_logprobs) == 19


def test_a_stream_with_drafts_gets_a_token_for_each_late_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Masks take three steps. Every step verifies drafts, and none waits."""
    expected = alone("[A-Z]+", max_tokens=24)
    monkeypatch.setattr(sequences, "_MASK_WAIT_S", 0.0)
    gate = Gate(monkeypatch, lambda place: not place.drafts)
    hand, _ = run_by_hand(EXACT)
    stream = add(hand, "it", "[A-Z]+", max_tokens=24)
    hand.add("free", prompt(10, salt=1), max_tokens=200)
    hand.step(it=20, free=10)
    num_steps = 0
    while stream.num_left > 3:
        coming = expected.output[len(stream.output) :][:3]
        drafts = {"it": coming} if num_steps % 2 else {"it": [5, 6]}
        hand.step(drafts, it=len(stream.tokens) - stream.num_computed, free=1)
        num_steps += 1
        if num_steps % 3 == 0:
            gate.let_one_pass()
        assert num_steps < 150, stream.output
        assert gate.num_waiting <= 1
    gate.open()
    hand.finish()
    assert stream.output == expected.output


def test_drafts_are_verified_as_far_as_masks_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask of the next token is there, and those after drafts are late."""
    expected = alone("[A-Z]+", max_tokens=9, logprobs=1)
    hand, _ = run_by_hand(EXACT)
    stream = add(hand, "it", "[A-Z]+", max_tokens=9, logprobs=1)
    free = hand.add("free", prompt(10, salt=1), max_tokens=100)
    gate = Gate(monkeypatch, lambda place: bool(place.drafts))
    hand.step(it=20)
    most = 1
    while stream.num_left > 3:
        before = len(stream.output)
        drafts = expected.output[before : before + 3]
        hand.step({"it": drafts}, it=1, free=len(free.tokens) - free.num_computed)
        assert len(stream.output) <= before + most
        if gate.num_waiting:  # a permit that none waits for would let a later call through
            gate.let_one_pass()
            most = 1 + len(drafts)  # those masks may be there before the next step samples
    gate.open()
    hand.finish()
    assert stream.output == expected.output
    assert [s.token_id for s in stream.logprobs] == [s.token_id for s in expected.logprobs]


def test_a_slow_grammar_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {name: alone("[A-Z]+", max_tokens=6, **NAMED[name]).output for name in NAMED}
    hand, _ = run_by_hand(EXACT)
    streams = {name: add(hand, name, "[A-Z]+", max_tokens=6, **NAMED[name]) for name in NAMED}
    hand.step(quick=20, failing=20, other=20)
    wait_for_masks(hand)
    slow = constraint_of(hand, "failing")
    slow.mask_s = 60.0
    gate = Gate(monkeypatch, lambda place: place.matcher is slow.grammar.matcher)
    for _ in range(1000):
        left = {n: s for n, s in streams.items() if s.num_left}
        if left.keys() <= {"failing"}:
            break
        hand.step(**{n: len(s.tokens) - s.num_computed for n, s in left.items()})
    assert {n: streams[n].output for n in ("quick", "other")} == {
        n: expected[n] for n in ("quick", "other")
    }
    assert len(streams["failing"].output) <= 2
    gate.open()
    hand.finish()
    assert streams["failing"].output == expected["failing"]


def test_jobs_of_requests_that_have_ended_make_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    num_made = 0
    compute = MaskMaker._compute

    def counted(maker: MaskMaker, places: Sequence[_Place], masks: Masks) -> None:
        nonlocal num_made
        num_made += len(places)
        compute(maker, places, masks)

    monkeypatch.setattr(MaskMaker, "_compute", counted)
    gate = Gate(monkeypatch)
    hand, _ = run_by_hand(EXACT)
    hand.add("free", prompt(10, salt=1), max_tokens=100)
    hand.step(free=10)
    for i in range(20):
        add(hand, f"s{i}", "[A-Z]+")
        hand.step(**{f"s{i}": 20}, free=1)
        hand.end(f"s{i}")
    last = add(hand, "last", "[A-Z]+", max_tokens=1)
    hand.step(last=20, free=1)
    gate.open()
    while last.num_left:
        hand.step(last=1, free=1)
    assert num_made <= 3, "the one that was being made, and those of the last"


class _FailingMatcher:
    """A matcher that fails when a token comes."""

    def __init__(self, matcher: LLMatcher, fail: Callable[..., Any]) -> None:
        self._matcher = matcher
        self.consume_token = fail

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


class PanicException(BaseException):
    """As PyO3 raises where Rust panics."""


@pytest.mark.parametrize("error", [PanicException, ValueError, MemoryError])
@pytest.mark.parametrize("place", ["mask", "token"])
def test_a_grammar_that_fails_ends_its_own_request(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], place: str
) -> None:
    form = "([A-Z]{2}[0-9])*"
    expected = {name: alone(form, max_tokens=12, **NAMED[name]).output for name in NAMED}
    hand, _ = run_by_hand(EXACT)
    streams = {name: add(hand, name, form, max_tokens=12, **NAMED[name]) for name in NAMED}
    hand.step(quick=20, failing=20, other=20)
    wait_for_masks(hand)
    constraint = constraint_of(hand, "failing")
    matcher, compute = constraint.grammar.matcher, MaskMaker._compute

    def fail(*_: Any) -> Any:
        raise error("attempt to subtract with overflow")

    def failing(maker: MaskMaker, places: Sequence[_Place], masks: Masks) -> None:
        if any(found.matcher is matcher for found in places):
            fail()
        compute(maker, places, masks)

    if place == "mask":
        monkeypatch.setattr(MaskMaker, "_compute", failing)
    else:
        broken: Any = _FailingMatcher(matcher, fail)
        constraint.grammar = Grammar(broken, constraint.grammar.end)
    hand.finish()
    assert "attempt to subtract with overflow" in streams["failing"].error
    for name in ("quick", "other"):
        assert not streams[name].error
        assert streams[name].output == expected[name]


def test_drafts_that_a_grammar_fails_at_end_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone("[A-Z]+", max_tokens=9)
    compute = MaskMaker._compute

    def failing(maker: MaskMaker, places: Sequence[_Place], masks: Masks) -> None:
        if any(place.drafts for place in places):
            raise PanicException("attempt to subtract with overflow")
        compute(maker, places, masks)

    monkeypatch.setattr(MaskMaker, "_compute", failing)
    hand, _ = run_by_hand(EXACT)
    stream = add(hand, "it", "[A-Z]+", max_tokens=9)
    hand.step(it=20)
    while stream.num_left > 3:
        before = len(stream.output)
        hand.step({"it": expected.output[before : before + 3]}, it=1)
    hand.finish()
    assert stream.output == expected.output


def test_a_grammar_that_takes_too_much_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        matcher, "_LIMITS", LLParserLimits(max_lexer_states=30, verbose_errors=False)
    )
    hand, _ = run_by_hand(EXACT)
    hard = add(hand, "hard", "[a-z]{60}")
    other = add(hand, "other", "[ab]+", max_tokens=30)
    hand.finish()
    assert "takes too much" in hard.error
    assert len(other.output) == 30
    assert not other.error
