import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.scheduler.budget import UNLIMITED, StepBudget
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel
from tests.profiles import examples
from tests.scheduler.harness import Harness
from tests.scheduler.step_times import calibrate, step_shape, true_costs

MAX_LEN = 4000
PACED = StepCosts(step_s=0.03, row_s=(0.0,) * 5, decode_row_s=0.0016, chunk_s=0.002)
"""A step takes 31.6 ms with one stream, 132 ms with 64."""
MIXED = step_shape(num_decodes=2, context=9, chunk=20)


def test_a_budget_that_decodes_exceed_leaves_nothing_and_never_less() -> None:
    budget, shape = StepBudget(StepTimeModel(), 8), StepShape()
    assert budget.max_chunk(shape, 0, 100, UNLIMITED) == 8
    shape.num_decode_rows, shape.num_prefill_tokens = 3, 4
    assert budget.max_chunk(shape, 0, 100, UNLIMITED) == 1
    assert not budget.is_exceeded(shape, UNLIMITED)
    shape.num_decode_rows = 20
    assert budget.max_chunk(shape, 0, 100, UNLIMITED) == 0
    assert budget.is_exceeded(shape, UNLIMITED)


@given(
    costs=true_costs(),
    limits_s=st.tuples(st.floats(1e-6, 10.0), st.floats(1e-6, 10.0)),
    num_decodes=st.integers(1, 64),
    context=st.integers(1, MAX_LEN),
    num_mixed=st.integers(0, 30),
    error=st.floats(0.0, 1.0),
)
@examples(200)
def test_a_tighter_promise_lets_no_more_streams_run(
    costs: StepCosts,
    limits_s: tuple[float, float],
    num_decodes: int,
    context: int,
    num_mixed: int,
    error: float,
) -> None:
    model = StepTimeModel(calibrate(costs, MAX_LEN))
    for _ in range(num_mixed):  # which makes margins of all sizes
        model.observe(MIXED, costs.seconds(MIXED), (1.0 + error) * costs.seconds(MIXED))
    budget = StepBudget(model, 2048)
    streams = step_shape(num_decodes=num_decodes, context=context)
    tight_s, loose_s = sorted(limits_s)
    assert budget.keeps_pace(step_shape(num_decodes=1, context=context), tight_s)
    assert budget.keeps_pace(streams, loose_s) or not budget.keeps_pace(streams, tight_s)
    alone_s = model.seconds(step_shape(num_decodes=1, context=context))
    if num_decodes > 1 and budget.keeps_pace(streams, loose_s):
        assert model.seconds(streams) <= max(loose_s, 1.1 * alone_s) * (1 + 1e-9)


@pytest.mark.parametrize("is_cold", [True, False])
def test_the_number_of_streams_falls_with_the_promise_and_in_steps(is_cold: bool) -> None:
    """From 50 ms to 52 it was all of 64 streams or one at a time, where the margin was 0.6."""
    most_running = []
    for slo_s in (0.01, 0.03, 0.032, 0.04, 0.05, 0.052, 0.06, 0.08, 0.1, 0.15, 0.3):
        model = StepTimeModel(calibrate(PACED, MAX_LEN))
        for _ in range(0 if is_cold else 600):
            model.observe(MIXED, PACED.seconds(MIXED))
        harness = Harness(
            budget=2048,
            max_num_seqs=64,
            num_blocks=4000,
            step_time=model,
            step_time_s=lambda plan: PACED.seconds(StepShape.of(plan)),
            itl_slo_s=slo_s,
        )
        for index in range(64):
            harness.add(str(index), 4, 40)
        running = []
        for _ in range(60):
            harness.step()
            running.append(harness.scheduler.stats.num_running)
        most_running.append(max(running))
    assert most_running == sorted(most_running)
    assert most_running[0] > 1
    assert most_running[-1] == 64
    assert max(b / a for a, b in itertools.pairwise(most_running)) < 4


SLOW = StepCosts(step_s=0.02, row_s=(0.004,) * 5)
"""Eight streams take 52 ms, and 32 tokens of a prompt beside them 180."""


def test_decodes_without_a_margin_leave_a_prompt_what_fits_into_the_promise() -> None:
    model = StepTimeModel(calibrate(SLOW, MAX_LEN))
    for _ in range(100):  # an interruption in every second step: the margin is as large as can be
        for late_s in (0.0, 0.06):
            model.observe(MIXED, SLOW.seconds(MIXED), SLOW.seconds(MIXED) + late_s, 0.15)
    budget = StepBudget(model, 2048)
    for num_decodes in (14, 16, 20, 24, 28):
        streams = step_shape(num_decodes=num_decodes, context=100)
        assert not budget.fits_decode(streams, 0.15)
        chunk = budget.max_chunk(streams, 0, 1000, 0.15)
        assert 16 <= chunk <= 32
        streams.add_prefill(0, chunk, samples=False)
        assert chunk == 16 or model.seconds(streams) <= 0.15


def test_prompts_that_leave_room_for_others_are_never_longer_than_the_promise_allows() -> None:
    """Seen: a shorter limit that decodes had used up led to longer chunks than the whole one."""
    model = StepTimeModel(calibrate(SLOW, MAX_LEN))
    harness = Harness(
        budget=2048,
        max_num_seqs=64,
        num_blocks=4000,
        step_time=model,
        step_time_s=lambda plan: SLOW.seconds(StepShape.of(plan)),
        itl_slo_s=0.15,
    )
    harness.add("of b", 4, 1, tenant="b")
    for index in range(12):
        harness.add(str(index), 100, 60, tenant="a")
    while (plan := harness.step()) is not None:
        shape = StepShape.of(plan)
        assert not shape.num_decode_rows or SLOW.seconds(shape) <= 0.15


@pytest.mark.parametrize(
    ("decode_row_s", "longest_s"), [(0.001, 0.05), (0.01, 0.104), (0.1, 0.25), (0.4, 0.806)]
)
def test_gaps_are_bounded_without_a_promise(decode_row_s: float, longest_s: float) -> None:
    """By eight steps of the streams, but 50 to 250 ms; prompts get half of each step at least."""
    costs = StepCosts(step_s=0.003, row_s=(0.001,) * 5, decode_row_s=decode_row_s)
    model = StepTimeModel(calibrate(costs, MAX_LEN))
    streams, idle = step_shape(num_decodes=1, context=100), StepShape()
    chunks = {}
    for bounds_gaps in (False, True):
        budget = StepBudget(model, 4096, bounds_gaps=bounds_gaps)
        chunks[bounds_gaps] = budget.max_chunk(streams, 0, 4096, UNLIMITED)
        assert budget.max_chunk(idle, 0, 4096, UNLIMITED) == pytest.approx(497, abs=20)
    streams.add_prefill(0, chunks[True], samples=False)
    assert 0.7 * longest_s <= model.seconds(streams) <= 1.05 * longest_s
    assert chunks[True] < chunks[False]


@pytest.mark.parametrize("bounds_gaps", [False, True])
def test_a_prompt_goes_on_without_a_promise_however_many_keys_it_reads(bounds_gaps: bool) -> None:
    costs = StepCosts(step_s=0.015, row_s=(1e-4,) * 5, context_s=1.5e-6, area_s=7e-8)
    budget = StepBudget(StepTimeModel(calibrate(costs, MAX_LEN)), 4096, bounds_gaps=bounds_gaps)
    step = step_shape(num_decodes=1, context=100)
    for start in (0, 100_000, 1_000_000):
        assert budget.max_chunk(step, start, 4096, UNLIMITED) >= 16
        assert budget.max_chunk(step, start, 5, UNLIMITED) == 5
    step.add_prefill(1_000_000, 16, samples=False)
    assert budget.max_chunk(step, 1_000_000, 4096, UNLIMITED) == 0


def test_a_bound_whose_cost_is_unknown_is_a_small_chunk() -> None:
    budget = StepBudget(StepTimeModel(), 4096, bounds_gaps=True)
    assert budget.max_chunk(step_shape(num_decodes=1, context=100), 0, 4096, UNLIMITED) == 32
    assert budget.max_chunk(StepShape(), 0, 4096, UNLIMITED) == 4096
