"""An inter-token latency holds wherever the model's error is inside its margin."""

from collections.abc import Collection
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from legato.core.plan import StepPlan
from legato.core.slo import SloClass
from legato.scheduler.budget import UNLIMITED
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel
from tests.profiles import examples
from tests.scheduler.harness import Harness
from tests.scheduler.step_times import (
    calibrate,
    noise_of,
    steady_model,
    step_shape,
    true_costs,
    truth,
)

MAX_MODEL_LEN = 300
ROUNDING_S = 1e-9


class PromiseHarness(Harness):
    """No step takes longer than predicted, margin included; all tokens must then be in time."""

    def __init__(self, costs: StepCosts, seed: int, **settings: Any) -> None:
        self.model = StepTimeModel(calibrate(costs, MAX_MODEL_LEN))
        self.allowed_s: dict[int, float] = {}  # key step
        self.promised: dict[int, list[str]] = {}
        """Key step, value the requests whose tokens must come in time."""
        actual_s = truth(costs, noise_of(seed))
        super().__init__(
            budget=100,
            num_blocks=200,
            max_model_len=MAX_MODEL_LEN,
            step_time=self.model,
            step_time_s=lambda plan: min(actual_s(plan), self.allowed_s[plan.step_id]),
            max_wait_s=3600.0,  # no prompt moves at the cost of a promise
            **settings,
        )
        self.num_kept = 0

    def allowed_for_s(self, shape: StepShape, limit_s: float) -> float:
        return self.model.seconds(shape) * self.model.safety_factor(limit_s)

    def plan(self) -> StepPlan | None:
        running = self.scheduler._queues.running
        begins_s = self.scheduler._dispatch.look_ahead(self.clock(), running)
        due_s = {id_: r.next_due_s for id_, r in running.items() if self.is_stream(r)}
        best_effort = {id_ for id_, r in running.items() if r.is_best_effort}
        plan = super().plan()
        if plan is None:
            return None
        step_limit_s = UNLIMITED if plan.limit_s is None else plan.limit_s
        self.allowed_s[plan.step_id] = self.allowed_for_s(StepShape.of(plan), step_limit_s)
        due_s = {id_: s for id_, s in due_s.items() if id_ not in plan.preempted}
        promised = [id_ for id_, s in due_s.items() if s < UNLIMITED]
        limit_s = min((due_s[id_] for id_ in promised), default=UNLIMITED) - begins_s
        must = must_run(plan, due_s.keys(), best_effort)
        must_hold = self.allowed_for_s(must, limit_s) <= limit_s
        self.promised[plan.step_id] = promised if must_hold else []
        self.num_kept += len(promised) if must_hold and len(plan.chunks) > len(due_s) else 0
        return plan

    def run(self, plan: StepPlan, *args: Any, **kwargs: Any) -> None:
        running = self.scheduler._queues.running
        promised = [id_ for id_ in self.promised[plan.step_id] if id_ in running]
        due_s = min((running[id_].token_due_s for id_ in promised), default=UNLIMITED)
        super().run(plan, *args, **kwargs)
        assert self.clock() <= due_s + ROUNDING_S


def must_run(plan: StepPlan, streams: Collection[str], best_effort: Collection[str]) -> StepShape:
    """Decodes that a step holds at any time: all with a promise, and one without."""
    chunks = [chunk for chunk in plan.chunks if chunk.request_id in streams]
    turns = [chunk for chunk in chunks if chunk.request_id in best_effort]
    shape = StepShape()
    for chunk in [c for c in chunks if c not in turns] + turns[:1]:
        shape.add_decode(chunk.end)
    return shape


def arrivals() -> st.SearchStrategy[list[tuple[int, dict[str, Any]]]]:
    """(steps before it, arguments of `Harness.add`)"""
    request = st.fixed_dictionaries(
        {
            "prompt_len": st.integers(1, 10) | st.integers(1, 200),
            "max_tokens": st.integers(5, 40),
            "slo_class": st.sampled_from(["interactive", "interactive", "steady", "batch"]),
        }
    )
    return st.lists(st.tuples(st.integers(0, 6), request), min_size=3, max_size=16)


@given(
    costs=true_costs(),
    seed=st.integers(0, 2**16),
    depth=st.integers(1, 3),
    itl=st.floats(1.1, 10.0),
    tpot=st.floats(1.1, 10.0),
    arrivals=arrivals(),
)
@examples(200)
def test_a_token_comes_in_time_whatever_the_machine(
    costs: StepCosts,
    seed: int,
    depth: int,
    itl: float,
    tpot: float,
    arrivals: list[tuple[int, dict[str, Any]]],
) -> None:
    """`itl` and `tpot` are in steps of three decodes."""
    unit_s = costs.seconds(step_shape(num_decodes=3, context=100))
    harness = PromiseHarness(
        costs,
        seed,
        depth=depth,
        itl_slo_s=itl * unit_s,
        slo_classes={"steady": SloClass(itl_s=2 * itl * unit_s, tpot_s=tpot * unit_s)},
    )
    for i, (num_steps, request) in enumerate(arrivals):
        for _ in range(num_steps):
            harness.step()
        harness.add(str(i), **request)
    harness.drain()
    event(f"tokens that came in time beside prefill: {min(harness.num_kept, 100) // 20 * 20}+")


LINEAR = StepCosts(step_s=0.01, row_s=(1e-3,) * 5, area_s=1e-6)


def linear_harness(model: StepTimeModel, **promises: float) -> Harness:
    return Harness(
        budget=2048,
        num_blocks=2000,
        max_model_len=4000,
        step_time=model,
        step_time_s=truth(LINEAR, lambda: 1.0),
        **promises,
    )


def test_a_long_prompt_gets_the_time_that_the_promise_leaves() -> None:
    """No step is shorter than allowed by more than the rows that it does without, to pad none.

    Each of these would take 4 ms at the end of the prompt, where its attention is longest.
    """
    harness = linear_harness(steady_model(LINEAR, 4000), itl_slo_s=0.2)
    for request_id in "abc":
        harness.add(request_id, 5, max_tokens=200)
    for _ in range(104):  # so that one late gap would not break a promise
        harness.step()
    harness.add("long", 3000, max_tokens=1)
    while not harness.finish_reasons["long"]:
        harness.step()
    gaps_s = [t - s for s, t in pairwise(harness.token_times_s["a"])]
    beside_s = gaps_s[103:-1]
    assert len(beside_s) > 10
    assert max(beside_s) <= 0.2
    assert min(beside_s) > 0.19 - 15 * 4e-3


def test_slack_is_spent_where_only_a_pace_is_promised() -> None:
    """Ten tokens ahead of its pace, a stream waits for one long step, and is still in time."""
    harness = linear_harness(StepTimeModel(calibrate(LINEAR, 4000)), tpot_slo_s=0.1)
    harness.add("stream", 5, max_tokens=60)
    for _ in range(11):
        harness.step()
    harness.add("long", 3000, max_tokens=1)
    harness.drain()
    first_s, *times_s = harness.token_times_s["stream"]
    assert max(t - s for s, t in pairwise(times_s)) > 0.3
    assert all(t <= first_s + 0.1 * k + ROUNDING_S for k, t in enumerate(times_s, start=1))


@pytest.mark.parametrize("itl_slo_s", [0.02, 0.05])
def test_more_streams_than_the_promise_bears_are_not_run_at_once(itl_slo_s: float) -> None:
    costs = StepCosts(step_s=0.005, row_s=(0.0,) * 5, decode_row_s=0.002)
    model = StepTimeModel(calibrate(costs, 128))
    harness = Harness(
        max_num_seqs=50,
        num_blocks=500,
        itl_slo_s=itl_slo_s,
        step_time=model,
        step_time_s=truth(costs, lambda: 1.0),
    )
    for i in range(40):
        harness.add(str(i), 1, max_tokens=10)
    harness.drain()
    most = max(len(plan.chunks) for plan in harness.plans)
    allowed_s = itl_slo_s / (1.0 + model.margin)
    assert 0.005 + 0.002 * most <= allowed_s < 0.005 + 0.002 * (most + 2)


@pytest.mark.parametrize("num_late", [1, 6])
def test_a_step_that_begins_late_leaves_prompts_to_the_next_one(num_late: int) -> None:
    """For a flood of arrivals, say. Its streams are in time, and prompts go on in every other."""
    harness = linear_harness(steady_model(LINEAR, 4000), itl_slo_s=0.05)
    harness.add("stream", 5, max_tokens=200)
    for _ in range(104):
        harness.step()
    harness.add("long", 3000, max_tokens=1)
    harness.step()
    num_prefills = []
    for _ in range(num_late):
        harness.clock.advance_to(harness.clock() + 0.03895)
        plan = harness.step()
        assert plan is not None
        num_prefills.append(sum(chunk.kind == "prefill" for chunk in plan.chunks))
    assert num_prefills == [0, 1, 0, 1, 0, 1][:num_late]
    in_time_s = [t - s for s, t in pairwise(harness.token_times_s["stream"])][-num_late::2]
    assert max(in_time_s) <= 0.05
    harness.drain()
