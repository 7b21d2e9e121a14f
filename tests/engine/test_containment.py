"""What bookkeeping raises for one request ends that request, and nothing else."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from legato.core.config import EngineConfig, SchedulerConfig
from legato.core.outputs import FinishReason
from legato.core.request import AbortRequest, AddRequest, Request
from legato.core.slo import ServiceParams
from legato.core.stats import EngineStats
from legato.core.structured_outputs import StructuredOutputs
from legato.engine.errors import EngineFaultError
from legato.engine.main import _deliver
from legato.engine.process.channel import FrameDecoder
from legato.engine.process.engine_messages import GetState, StateReport, StepOutputs
from legato.engine.process.engine_process import EngineProcess
from tests.engine import raising_engine
from tests.engine.raising_engine import BookkeepingError
from tests.engine.test_engine_loop import (
    Engine,
    coming,
    drain,
    reasons,
    request,
    tokens,
    undisturbed,
)
from tests.scheduler.drafters import RandomDrafter

NONE = EngineStats()

Parts = dict[str, Callable[[Engine], tuple[object, str]]]

AT_ARRIVAL: Parts = {
    "queue": lambda engine: (engine._scheduler._queues, "add"),
    "order": lambda engine: (engine._scheduler._queues, "order"),
    "cache": lambda engine: (engine._kv.lookup, "num_hit_tokens"),
    "shedding": lambda engine: (engine._scheduler._shedding, "check_arrival"),
    "recorder": lambda engine: (engine._recorder, "note_events"),
    "grammars": lambda engine: (engine.grammars, "hold_back"),
}
"""Parts that note a request when it comes; value an object and its method."""

LATER: Parts = {
    "drafts": lambda engine: (engine._scheduler._drafters, "advance"),
    "forecast errors": lambda engine: (engine._scheduler._forecast_errors, "observe"),
    "cached blocks": lambda engine: (engine._kv, "commit"),
    "drafters": lambda engine: (engine._scheduler._drafters._drafters[0], "forget"),
    "release": lambda engine: (engine._scheduler, "_note_end"),
}
"""Parts that note its tokens, or its end."""


def names_poison(argument: Any) -> bool:
    if isinstance(argument, list):
        return any(map(names_poison, argument))
    return getattr(argument, "request_id", "").startswith("poison")


def poison(monkeypatch: pytest.MonkeyPatch, owner: object, method: str) -> None:
    """Have a part of the engine raise for a request whose name says so."""
    real = getattr(owner, method)

    def raising(*args: Any, **more: Any) -> Any:
        if names_poison(args[0]):
            raise BookkeepingError(method)
        return real(*args, **more)

    monkeypatch.setattr(owner, method, raising)


def drafting_engine() -> Engine:
    drafter = RandomDrafter(coming, vocab_size=32_000)
    return Engine(lambda _: None, drafters=[drafter], speculative=3)


@pytest.mark.parametrize("part", [*AT_ARRIVAL, *LATER])
def test_what_a_part_raises_ends_the_request_alone(
    part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = drafting_engine()
    poison(monkeypatch, *{**AT_ARRIVAL, **LATER}[part](engine))
    form = StructuredOutputs(grammar="start: /a+/") if part == "grammars" else None
    poison_request = request("poison", 50, structured_outputs=form)
    outputs = engine.step([request("a", 30), poison_request, request("b", 20)])
    outputs += drain(engine)
    ends = reasons(outputs)
    assert ends.keys() == {"a", "b", "poison"}
    if part not in ("drafters", "release"):  # its end is told before all of it is released
        assert ends["poison"] is FinishReason.ERROR
        [last] = [o for o in outputs if o.request_id == "poison" and o.finish_reason]
        assert last.error is not None
        assert last.error.startswith("internal error: BookkeepingError")
    for name, prompt_len in (("a", 30), ("b", 20)):
        assert tokens(outputs, name) == undisturbed(name, prompt_len)
    assert engine.stats.num_contained_errors >= 1
    assert engine.stats.kv_usage == 0.0
    assert engine.stats.num_running == engine.stats.num_waiting == 0
    assert not any(tenant.num_waiting or tenant.num_running for tenant in engine.stats.tenants)
    assert any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_abort_that_raises_ends_its_request(
    num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(lambda _: None)
    outputs = engine.step([request("a", 30), request("poison", 50)])
    for _ in range(num_steps):
        outputs += engine.step()

    def raising(request_id: str) -> None:
        raise BookkeepingError(request_id)

    monkeypatch.setattr(engine._scheduler, "_abort", raising)
    outputs += engine.step([AbortRequest(request_id="poison")])
    outputs += engine.step([AbortRequest(request_id="never seen")])
    outputs += drain(engine)
    ends = reasons(outputs)
    assert ends == {"a": FinishReason.LENGTH, "poison": FinishReason.ERROR}
    assert engine.stats.kv_usage == 0.0


def test_a_request_that_was_pushed_out_has_its_end_though_the_next_one_raises() -> None:
    """The queue is full; the newcomer has room made for it, and raises when it is to wait."""
    engine = Engine(max_num_seqs=1, max_waiting=2)
    outputs = engine.step([request("running", 8, max_tokens=50)])
    for name in ("first", "second"):
        outputs += engine.step([of_tenant(name, "crowd")])
    raising_engine.raise_in_order(engine)
    outputs += engine.step([of_tenant("order", "other")])
    ends = reasons(outputs)
    assert ends == {"second": FinishReason.REFUSED, "order": FinishReason.ERROR}
    outputs += drain(engine)
    assert reasons(outputs).keys() == {"running", "first", "second", "order"}


def of_tenant(name: str, tenant: str) -> AddRequest:
    return msgspec.structs.replace(request(name, 8), service=ServiceParams(tenant=tenant))


async def told(engine: EngineProcess) -> AsyncIterator[Any]:
    async with asyncio.timeout(60):
        async for message in engine.steps():
            yield message


async def test_a_real_engine_process_goes_on() -> None:
    program = (sys.executable, "-m", raising_engine.__name__)
    async with EngineProcess.starting(EngineConfig(), program) as engine:
        await engine.ready()
        messages = told(engine)
        engine.send(GetState())
        state = await anext(messages)
        assert isinstance(state, StateReport)
        assert state.state is not None
        for name in ("a", "order 1", "surrogate", "b", "order 2"):
            engine.send(request(name, 20))
        ends: dict[str, FinishReason] = {}
        num_errors = 0
        while len(ends) < 5:
            message = await anext(messages)
            assert isinstance(message, StepOutputs)
            for output in message.outputs:
                if output.finish_reason is not None:
                    assert output.request_id not in ends
                    ends[output.request_id] = output.finish_reason
            num_errors = message.stats.num_contained_errors
        failed = {name for name, reason in ends.items() if reason is FinishReason.ERROR}
        assert failed == {"order 1", "order 2", "surrogate"}
        assert num_errors == 3
        engine.send(GetState())
        assert await anext(messages) == StateReport(None)
        await engine.close()


@pytest.mark.parametrize("num_in_flight", [1, 2])
@pytest.mark.parametrize("place", ["running", "waiting"])
def test_a_request_that_no_step_can_be_planned_with_ends(place: str, num_in_flight: int) -> None:
    """It is found among others, running or waiting, though nothing that raises names it."""
    engine = Engine(
        lambda _: None, depth=num_in_flight, max_num_seqs=8 if place == "running" else 2
    )
    names = ["a", "b", "poison", "c", "d", "poison too"]
    outputs = engine.step([request(name, 20) for name in names])
    queues, real = engine._scheduler._queues, engine._scheduler._lateness.begin_step

    def raising(*args: Any, **more: Any) -> None:
        if any(name.startswith("poison") for name in (*queues.running, *queues._waiting)):
            raise BookkeepingError("no name")
        real(*args, **more)

    engine._scheduler._lateness.begin_step = raising  # type: ignore[method-assign]
    outputs += drain(engine)
    ends = reasons(outputs)
    failed = {name for name, reason in ends.items() if reason is FinishReason.ERROR}
    assert ends.keys() == set(names)
    assert failed == {"poison", "poison too"}
    for name in "abcd":
        assert tokens(outputs, name) == undisturbed(name, 20)
    assert engine.stats.num_contained_errors
    assert engine.stats.kv_usage == 0.0


def test_of_requests_that_only_together_make_planning_raise_the_newest_ends() -> None:
    engine = Engine()
    outputs = engine.step([request(name, 20, max_tokens=9) for name in ("old", "a")])
    queues, real = engine._scheduler._queues, engine._scheduler._budget.recover

    def raising(now_s: float) -> None:
        if "old" in queues and "new" in queues:
            raise ZeroDivisionError
        real(now_s)

    engine._scheduler._budget.recover = raising  # type: ignore[method-assign]
    outputs += engine.step([request("new", 20), request("b", 20)]) + drain(engine)
    failed = {name for name, end in reasons(outputs).items() if end is FinishReason.ERROR}
    assert failed == {"new"}


def test_an_engine_that_can_plan_no_step_ends() -> None:
    engine = Engine()
    outputs = engine.step([request("a", 20)])

    def raising(now_s: float) -> None:
        del now_s
        raise ZeroDivisionError

    engine._scheduler._budget.recover = raising  # type: ignore[method-assign]
    with pytest.raises(EngineFaultError, match="no step can be planned"):
        outputs += drain(engine)
    assert not reasons(outputs)


def test_an_abort_between_a_failed_plan_and_the_next_ends_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The failed plan made a chunk for it that no step computes."""
    engine = Engine(depth=2)
    outputs = engine.step([request("a", 20)])
    has_raised, plan = list[bool](), engine._scheduler._dispatch.plan

    def raising(*args: Any, **more: Any) -> Any:
        if "b" not in engine._scheduler._queues.running or has_raised:
            return plan(*args, **more)
        has_raised.append(True)
        raise BookkeepingError("once")

    monkeypatch.setattr(engine._scheduler._dispatch, "plan", raising)
    monkeypatch.setattr(engine, "_land", list)  # the step in flight takes a while
    outputs += engine.step([request("b", 20)])
    assert has_raised
    outputs += engine.step([AbortRequest(request_id="b")])
    monkeypatch.undo()
    outputs += drain(engine)
    assert reasons(outputs) == {"a": FinishReason.LENGTH, "b": FinishReason.ABORT}
    assert tokens(outputs, "a") == undisturbed("a", 20)
    assert engine.stats.kv_usage == 0.0


@pytest.mark.parametrize("part", ["drafters", "promise"])
def test_settings_that_cannot_be_taken_leave_those_of_before(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(budget=8, max_num_seqs=2)
    names = ["a", "b", "c", "d"]
    outputs = engine.step([request(name, 20) for name in names])
    before = engine._scheduler._config
    drafters = engine._scheduler._drafters
    owner, method = (drafters, "configure") if part == "drafters" else (Request, "change_promise")
    real, num_calls = getattr(owner, method), 0

    def raising(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise BookkeepingError(part)
        return real(*args)

    monkeypatch.setattr(owner, method, raising)
    engine.reconfigure(SchedulerConfig(max_num_batched_tokens=16, speculative=2).resolve(400))
    outputs += engine.step() + drain(engine)
    assert num_calls > 1
    assert engine._scheduler._config == before
    assert max(plan.num_tokens for plan in engine.executor.steps) == 8
    assert engine.stats.num_contained_errors == 1
    assert reasons(outputs) == dict.fromkeys(names, FinishReason.LENGTH)


class Outlet:
    """Stands in for a channel, and decodes what is sent."""

    def __init__(self) -> None:
        self.sent: list[StepOutputs] = []

    def send_frame(self, frame: bytes) -> None:
        self.sent += FrameDecoder(StepOutputs).feed(frame)


@pytest.mark.parametrize("part", ["records", "kv_events", "stats", "outputs"])
def test_what_cannot_be_packed_is_left_out(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, outlet = Engine(), Outlet()
    outputs = engine.step([request("a", 20), request("b", 20)])
    assert len(outputs) == 2
    broken = {
        "records": (engine, "take_records", lambda: [object()]),
        "kv_events": (engine, "take_kv_events", lambda: [object()]),
        "stats": (engine, "_count", lambda: msgspec.structs.replace(NONE, broken_promise="\ud800")),
        "outputs": (engine, "take_records", list),
    }
    monkeypatch.setattr(*broken[part])
    if part == "outputs":
        outputs[0] = msgspec.structs.replace(outputs[0], error="\ud800")
    _deliver(outputs, engine, outlet)  # type: ignore[arg-type]
    [sent] = outlet.sent
    ends = [output.finish_reason for output in sent.outputs]
    assert ends == [FinishReason.ERROR if part == "outputs" else None, None]
    assert sent.outputs[1] == outputs[1]
    assert engine.containment.num_errors
