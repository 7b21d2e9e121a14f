"""Nobody is refused who could have been served in time."""

import copy
from typing import Any

import msgspec
from hypothesis import event, given
from hypothesis import strategies as st

from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AddRequest
from legato.core.slo import SloClass
from legato.executor.simulated import SimulatedExecutor, VirtualClock
from legato.scheduler.order import ORDERS
from legato.scheduler.scheduler import Scheduler
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel
from tests.profiles import examples
from tests.scheduler.harness import Harness
from tests.scheduler.step_times import calibrate, step_shape, true_costs

MAX_MODEL_LEN = 400
_NEARLY = 0.75
"""The forecast counts steps in fractions and plays prompts one after the other: in contrived cases
what it refuses would have come just in time."""


class SheddingHarness(Harness):
    """Steps last exactly what is believed. `refused` says what would have become of a request."""

    def __init__(self, costs: StepCosts, **settings: Any) -> None:
        model = StepTimeModel(calibrate(costs, MAX_MODEL_LEN))
        super().__init__(
            num_blocks=1500,
            max_model_len=MAX_MODEL_LEN,
            shed_load=True,
            step_time=model,
            step_time_s=lambda plan: model.seconds(StepShape.of(plan)),
            **settings,
        )
        self.refused: dict[str, float] = {}
        """Key request id, value the TTFT in seconds that it would have had."""

    def add(self, request_id: str, *args: Any, **service: Any) -> None:
        before = copy.deepcopy(self.scheduler)
        super().add(request_id, *args, **service)
        if self.finish_reasons[request_id] == [FinishReason.REFUSED]:
            self.refused[request_id] = served_ttft_s(before, self.added[request_id])

    def take(self, outputs: list[RequestOutput]) -> None:
        super().take(outputs)
        for output in outputs:
            assert output.finish_reason is not FinishReason.REFUSED or output.retry_after_s


def served_ttft_s(scheduler: Scheduler, message: AddRequest) -> float:
    """The TTFT of a request that is let in after all, if nobody comes after it."""
    scheduler._shedding._config = msgspec.structs.replace(scheduler._config, shed_load=False)
    clock = VirtualClock()
    clock.advance_to(message.arrival_time_s)
    model = scheduler._step_time
    executor = SimulatedExecutor(clock, lambda plan: model.seconds(StepShape.of(plan)))
    assert not scheduler.apply([message], clock())
    while True:
        plan = scheduler.plan(clock())
        assert plan is not None
        executor.submit(plan)
        result = executor.collect()
        scheduler.commit(result, clock())
        if (done := result.chunks.get(message.request_id)) is not None and done.token_ids:
            return clock() - message.arrival_time_s


def arrivals() -> st.SearchStrategy[list[tuple[int, dict[str, Any]]]]:
    """(steps before it, arguments of `Harness.add`)"""
    request = st.fixed_dictionaries(
        {
            "prompt_len": st.integers(1, 30) | st.integers(1, 300),
            "max_tokens": st.integers(1, 60),
            "slo_class": st.sampled_from(["interactive", "interactive", "hurried", "batch"]),
            "priority": st.sampled_from([0, 0, -1, 1]),
        }
    )
    return st.lists(st.tuples(st.integers(0, 6), request), min_size=3, max_size=40)


def shedding_harness() -> st.SearchStrategy[SheddingHarness]:
    return st.builds(
        _shedding_harness,
        true_costs().map(_without_depth),
        order=st.sampled_from([*ORDERS]),
        ttft=st.floats(20.0, 100.0),
        itl=st.none() | st.floats(1.5, 10.0),
        tpot=st.none() | st.floats(1.5, 10.0),
        max_num_seqs=st.integers(1, 10),
    )


def _without_depth(costs: StepCosts) -> StepCosts:
    """Where most of a step is attention, a short prompt slips in beside a long one's rest."""
    return msgspec.structs.replace(
        costs, area_s=costs.area_s / 100, context_s=costs.context_s / 100
    )


def _shedding_harness(
    costs: StepCosts,
    order: str,
    ttft: float,
    itl: float | None,
    tpot: float | None,
    max_num_seqs: int,
) -> SheddingHarness:
    """The promises are in steps of three decodes."""
    unit_s = costs.seconds(step_shape(num_decodes=3, context=100))
    return SheddingHarness(
        costs,
        prefill_order=order,
        budget=100,
        max_num_seqs=max_num_seqs,
        ttft_slo_s=ttft * unit_s,
        itl_slo_s=None if itl is None else itl * unit_s,
        tpot_slo_s=None if tpot is None else tpot * unit_s,
        slo_classes={"hurried": SloClass(ttft_s=0.5 * ttft * unit_s)},
    )


@given(harness=shedding_harness(), arrivals=arrivals())
@examples(150)
def test_who_is_refused_would_have_been_late(
    harness: SheddingHarness, arrivals: list[tuple[int, dict[str, Any]]]
) -> None:
    for i, (num_steps, request) in enumerate(arrivals):
        for _ in range(num_steps):
            harness.step()
        harness.add(str(i), **request)
    event(f"refused: {len(harness.refused)}")
    for request_id, ttft_s in harness.refused.items():
        slo = harness.config.classes[harness.added[request_id].service.slo_class]
        assert slo.ttft_s is not None
        assert ttft_s > _NEARLY * slo.ttft_s


@given(harness=shedding_harness(), arrivals=arrivals())
@examples(50)
def test_who_takes_best_effort_is_not_refused(
    harness: SheddingHarness, arrivals: list[tuple[int, dict[str, Any]]]
) -> None:
    for i, (num_steps, request) in enumerate(arrivals):
        for _ in range(num_steps):
            harness.step()
        harness.add(str(i), **request, allow_best_effort=True)
    harness.drain()
    assert set(map(tuple, harness.finish_reasons.values())) == {(FinishReason.LENGTH,)}
