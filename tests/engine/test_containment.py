"""What bookkeeping raises for one request ends that request, and nothing else."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from legato.core.config import EngineConfig
from legato.core.outputs import FinishReason
from legato.core.request import AbortRequest, AddRequest
from legato.core.slo import ServiceParams
from legato.core.structured_outputs import StructuredOutputs
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
