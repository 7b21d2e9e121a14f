"""Requests that wait for their grammars: beside the loop, bounded, and ended alone."""

import threading
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
        more = grammars.hold_back(())
        passed, outputs = passed + more[0], outputs + more[1]
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
