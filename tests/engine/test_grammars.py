"""Requests that wait for their grammars: beside the loop, bounded, and ended alone."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from legato import SamplingParams, StructuredOutputs
from legato.core.outputs import FinishReason, RefusalReason, RequestOutput
from legato.core.request import AbortRequest, AddRequest, Event
from legato.core.token_ids import token_array
from legato.core.vocabulary import Vocabulary
from legato.engine.loop import grammars as module
from legato.engine.loop.grammars import Grammars
from legato.grammar.matcher import compile_grammar

VOCABULARY = Vocabulary.of((bytes([i]) for i in range(256)), frozenset())


@pytest.fixture
def grammars() -> Grammars:
    made = Grammars(max_waiting=2)
    made.set_vocabulary(VOCABULARY)
    return made


@pytest.fixture
def may_compile(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Compiles nothing before it is set."""
    event = threading.Event()

    def waiting(*args: Any) -> Any:
        assert event.wait(60)
        return compile_grammar(*args)

    monkeypatch.setattr(module, "compile_grammar", waiting)
    yield event
    event.set()


def request(request_id: str, regex: str | None = "[ab]+", *, is_rerun: bool = False) -> AddRequest:
    form = None if regex is None else StructuredOutputs(grammar=f"start: /{regex}/")
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=token_array([1]),
        params=SamplingParams(structured_outputs=form),
        is_rerun=is_rerun,
    )


def settled(grammars: Grammars, *events: Event) -> tuple[list[Event], list[RequestOutput]]:
    """What comes of events once everything is compiled."""
    passed, outputs = grammars.hold_back(events)
    while grammars.is_compiling:
        grammars.wait(60)
        ready, ended = grammars.take_ready()
        passed, outputs = [*passed, *ready], outputs + ended
    return passed, outputs


def test_others_go_on_while_one_waits(grammars: Grammars, may_compile: threading.Event) -> None:
    free, waiting = request("free", None), request("waiting")
    assert grammars.hold_back([waiting, free]) == ([free], [])
    assert grammars.is_compiling
    assert not grammars.has_ready
    may_compile.set()
    assert settled(grammars) == ([waiting], [])
    assert grammars["waiting"].matcher.consume_token(ord("a"))


def test_one_that_is_aborted_meanwhile_ends(
    grammars: Grammars, may_compile: threading.Event
) -> None:
    passed, outputs = grammars.hold_back([request("r"), AbortRequest(request_id="r")])
    assert not passed
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("r", FinishReason.ABORT)]
    may_compile.set()
    assert not grammars.is_compiling
    assert settled(grammars) == ([], [])


def test_one_that_does_not_compile_ends_alone(grammars: Grammars) -> None:
    passed, [ended] = settled(grammars, request("bad", "a["), request("good"))
    assert [event.request_id for event in passed] == ["good"]
    assert (ended.request_id, ended.finish_reason) == ("bad", FinishReason.ERROR)
    assert "unclosed character class" in (ended.error or "")


def test_so_many_wait_and_one_more_is_refused(
    grammars: Grammars, may_compile: threading.Event
) -> None:
    _, [refused] = grammars.hold_back([request(name) for name in "abc"])
    assert (refused.request_id, refused.refusal) == ("c", RefusalReason.QUEUE_FULL)
    assert refused.retry_after_s
    assert grammars.hold_back([request("d", is_rerun=True)]) == ([], [])
    may_compile.set()
    assert {event.request_id for event in settled(grammars)[0]} == {"a", "b", "d"}


def test_each_request_has_a_state_of_its_own(grammars: Grammars) -> None:
    settled(grammars, request("a"), request("b"))
    assert grammars["a"].matcher.consume_token(ord("a"))
    assert not grammars["b"].matcher.is_accepting()
    grammars.forget([RequestOutput(request_id="a", finish_reason=FinishReason.STOP)])
    with pytest.raises(KeyError):
        grammars["a"]


def test_a_grammar_is_compiled_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[str] = []

    def counted(tokenizer: Any, source: str) -> Any:
        sources.append(source)
        return compile_grammar(tokenizer, source)

    monkeypatch.setattr(module, "compile_grammar", counted)
    settled(grammars, request("a"), request("b"))
    settled(grammars, request("c"), request("d", "x+"))
    assert len(sources) == 2


def test_the_tokenizer_is_made_before_anybody_waits_for_it(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars.prepare()
    monkeypatch.setattr(module, "grammar_tokenizer", None)
    grammars.prepare()
    a = request("a")
    assert settled(grammars, a) == ([a], [])


def test_how_long_each_took_is_told_once(grammars: Grammars, may_compile: threading.Event) -> None:
    grammars.hold_back([request("a"), request("free", None)])
    assert not grammars.take_compile_s()
    may_compile.set()
    settled(grammars)
    assert grammars.take_compile_s()["a"] > 0.0
    assert not grammars.take_compile_s()


class Machine:
    """A virtual clock, and compilations of grammars that do not end before `may_end` is set.

    Those of the sources in `endless` do not.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.may_end = threading.Event()
        self.begun = threading.Semaphore(0)
        self.endless: set[str] = set()
        self.num_compiled = 0

    def __call__(self) -> float:
        return self.now_s

    def compile(self, tokenizer: Any, source: str) -> Any:
        self.num_compiled += 1
        if source in self.endless:
            self.begun.release()
            assert self.may_end.wait(60)
        return compile_grammar(tokenizer, source)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setattr(module, "compile_grammar", made.compile)
    yield made
    made.may_end.set()


def timed(machine: Machine) -> Grammars:
    made = Grammars(clock=machine)
    made.set_vocabulary(VOCABULARY)
    return made


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_grammar_that_never_ends_compiling_is_given_up(
    machine: Machine, *, is_aborted: bool
) -> None:
    """The grammars behind it compile in another thread, and it is not compiled again."""
    grammars = timed(machine)
    endless, sound = request("endless", "e"), request("sound", "s")
    machine.endless = {"start: /e/"}
    grammars.hold_back([endless])
    assert machine.begun.acquire(timeout=60)
    grammars.hold_back([sound])
    ends = [] if not is_aborted else grammars.hold_back([AbortRequest(request_id="endless")])[1]
    machine.now_s = 59.0
    assert not grammars.has_ready
    assert grammars.take_ready() == ([], [])
    machine.now_s = 61.0
    assert grammars.has_ready
    ready, more = grammars.take_ready()
    ends += more
    passed, _ = settled(grammars)
    assert [*ready, *passed] == [sound]
    [end] = ends
    assert end.request_id == "endless"
    assert end.finish_reason is (FinishReason.ABORT if is_aborted else FinishReason.ERROR)
    num_compiled = machine.num_compiled
    _, [refused] = grammars.hold_back([request("again", "e")])
    assert refused.finish_reason is FinishReason.ERROR
    assert "takes too long" in (refused.error or "")
    assert machine.num_compiled == num_compiled


def test_work_that_ends_as_it_is_given_up_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next work begins at once, in the place of the one that took too long."""
    may_end = {source: threading.Event() for source in ("start: /long/", "start: /new/")}
    begun = threading.Semaphore(0)

    def compiled(tokenizer: Any, source: str) -> Any:
        begun.release()
        assert may_end[source].wait(60)
        return compile_grammar(tokenizer, source)

    def clock() -> float:
        if threading.current_thread() is threading.main_thread() and now_s:
            may_end["start: /long/"].set()
            begun.acquire(timeout=0.1)  # in vain, if the look keeps the work where it is
        return now_s

    monkeypatch.setattr(module, "compile_grammar", compiled)
    now_s = 0.0
    grammars = Grammars(clock=clock)
    grammars.set_vocabulary(VOCABULARY)
    grammars.hold_back([request("long", "long"), request("new", "new")])
    assert begun.acquire(timeout=60)
    late, now_s = grammars._worker, 61.0
    _, ends = grammars.take_ready()
    assert [end.request_id for end in ends] == ["long"]
    now_s = 0.0
    may_end["start: /new/"].set()
    assert [event.request_id for event in settled(grammars)[0]] == ["new"]
    late.submit(lambda: None).result(60)
    assert not grammars._stuck


def test_threads_with_endless_grammars_are_bounded(machine: Machine) -> None:
    grammars = timed(machine)
    machine.endless = {f"start: /{i}/" for i in range(9)}
    for i in range(9):
        _, ends = grammars.hold_back([request(f"{i}", f"{i}")])
        if not ends:
            assert machine.begun.acquire(timeout=60)
            machine.now_s += 61.0
            _, ends = grammars.take_ready()
        assert [end.finish_reason for end in ends] == [FinishReason.ERROR]
    assert machine.num_compiled == 5
    machine.may_end.set()
    while grammars._stuck:
        time.sleep(0.001)
    sound = request("sound")
    assert settled(grammars, sound) == ([sound], [])


class PanicError(BaseException):
    """Extensions raise their panics so."""


@pytest.mark.parametrize("error", [RecursionError("deep"), KeyError("k"), PanicError("panic")])
def test_what_a_compilation_raises_ends_its_request_alone(
    error: BaseException, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(tokenizer: Any, source: str) -> Any:
        if "bad" in source:
            raise error
        return compile_grammar(tokenizer, source)

    monkeypatch.setattr(module, "compile_grammar", raising)
    passed, [ended] = settled(grammars, request("bad", "bad"), request("good"))
    assert [event.request_id for event in passed] == ["good"]
    assert (ended.request_id, ended.finish_reason) == ("bad", FinishReason.ERROR)
    assert not ended.is_asked_for
    assert grammars.containment.num_errors == 1


def test_a_tokenizer_that_was_not_made_is_made_for_the_next_request(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(_: Any) -> Any:
        raise OSError("once")

    with monkeypatch.context() as patch:
        patch.setattr(module, "grammar_tokenizer", raising)
        _, [ended] = settled(grammars, request("first"))
    assert ended.finish_reason is FinishReason.ERROR
    second = request("second")
    assert settled(grammars, second) == ([second], [])


def test_a_request_that_ends_while_it_waits_is_not_passed_on(
    grammars: Grammars, may_compile: threading.Event
) -> None:
    """Another part of the engine has ended it by an error."""
    grammars.hold_back([request("r")])
    grammars.forget([RequestOutput(request_id="r", finish_reason=FinishReason.ERROR)])
    assert not grammars.is_compiling
    may_compile.set()
    assert settled(grammars) == ([], [])
