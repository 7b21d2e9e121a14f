"""The form of the cost model, and its inverse."""

import copy
from bisect import bisect_left

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.errors import ConfigError
from legato.core.plan import ScheduledChunk, StepPlan
from legato.core.rows import CPU_ROWS, GPU_ROWS, UNPADDED
from legato.scheduler.cost_fit import fit
from legato.scheduler.step_costs import NUM_TERMS, ROW_BOUNDS, StepCosts, features
from legato.scheduler.step_shape import StepShape
from tests.scheduler.step_times import calibrate, step_shape, true_costs

ROUNDING = 1e-9
PACKED = msgspec.structs.replace(UNPADDED, most_packed=64)


def shapes() -> st.SearchStrategy[StepShape]:
    return st.builds(
        step_shape,
        num_decodes=st.integers(0, 40),
        context=st.integers(1, 3000),
        chunk=st.integers(0, 1500),
        start=st.integers(0, 3000),
        samples=st.booleans(),
    )


def padded_costs() -> st.SearchStrategy[StepCosts]:
    return st.builds(
        lambda costs, rows, unpack_s: msgspec.structs.replace(costs, rows=rows, unpack_s=unpack_s),
        true_costs(),
        st.sampled_from([CPU_ROWS, GPU_ROWS, UNPADDED, PACKED]),
        st.floats(0.0, 0.05),
    )


def seconds_with_chunk(costs: StepCosts, shape: StepShape, start: int, num_tokens: int) -> float:
    longer = copy.copy(shape)
    if num_tokens:
        longer.add_prefill(start, num_tokens, samples=True)
    return costs.seconds(longer)


@given(costs=padded_costs(), shape=shapes())
def test_seconds_are_the_features_times_the_costs(costs: StepCosts, shape: StepShape) -> None:
    product = sum(x * c for x, c in zip(features(shape, costs.rows), costs.vector, strict=True))
    assert costs.seconds(shape) == pytest.approx(product)


@given(vector=st.lists(st.floats(0.0, 1.0), min_size=NUM_TERMS, max_size=NUM_TERMS))
def test_a_vector_makes_the_costs_that_have_it(vector: list[float]) -> None:
    assert StepCosts.from_vector(vector).vector == tuple(vector)  # type: ignore[arg-type]


@given(
    costs=true_costs(), shape=shapes(), start=st.integers(0, 3000), num_tokens=st.integers(1, 2000)
)
def test_a_chunk_costs_what_it_makes_the_step_longer(
    costs: StepCosts, shape: StepShape, start: int, num_tokens: int
) -> None:
    added_s = seconds_with_chunk(costs, shape, start, num_tokens) - costs.seconds(shape)
    assert costs.chunk_cost_s(shape, start, num_tokens) == pytest.approx(added_s, abs=ROUNDING)


@given(
    costs=padded_costs(),
    shape=shapes(),
    start=st.integers(0, 3000),
    cap=st.integers(0, 300),
    share=st.floats(0.0, 1.5),
)
def test_the_longest_chunk_is_the_inverse_of_the_seconds(
    costs: StepCosts, shape: StepShape, start: int, cap: int, share: float
) -> None:
    """Against all lengths up to the cap; `share` is of what the whole cap takes."""
    lengths = range(cap + 1)
    seconds = [seconds_with_chunk(costs, shape, start, n) for n in lengths]
    limit_s = share * seconds[-1]
    longest = costs.longest_chunk(shape, start, limit_s, cap)
    assert longest == 0 or seconds[longest] <= limit_s + ROUNDING
    assert longest == cap or seconds[longest + 1] > limit_s - ROUNDING


@given(
    costs=padded_costs(),
    shape=shapes(),
    start=st.integers(0, 3000),
    num_tokens=st.integers(1, 2000),
)
def test_a_chunk_ends_where_padding_begins_if_that_computes_more_a_second(
    costs: StepCosts, shape: StepShape, start: int, num_tokens: int
) -> None:
    chosen = costs.cheapest_chunk(shape, start, num_tokens)
    if chosen == num_tokens:
        return
    num_rows = shape.num_tokens + chosen
    assert ROW_BOUNDS[0] <= chosen < num_tokens
    assert costs.rows.padded(num_rows) == num_rows
    rate, whole = (n / seconds_with_chunk(costs, shape, start, n) for n in (chosen, num_tokens))
    assert rate > whole


def test_rows_that_are_not_computed_make_a_chunk_shorter_and_those_that_are_do_not() -> None:
    """On a GPU that multiplies by rows, or by nothing but its weights."""
    beside = step_shape(num_decodes=100, context=500)
    by_rows = StepCosts(step_s=1e-3, row_s=(20e-6,) * 5, rows=GPU_ROWS)
    assert by_rows.cheapest_chunk(beside, 0, 500) == 412
    assert by_rows.cheapest_chunk(beside, 0, 412) == 412
    by_steps = StepCosts(step_s=20e-3, row_s=(20e-6,) * 5, rows=GPU_ROWS)
    assert by_steps.cheapest_chunk(beside, 0, 130) == 130


def test_rows_that_would_have_weights_unpacked_are_left_out_unless_they_are_many() -> None:
    beside = step_shape(num_decodes=32, context=500)
    costs = StepCosts(step_s=4e-3, row_s=(6e-4,) * 5, unpack_s=20e-3, rows=PACKED)
    assert costs.rows_s(64) + 20e-3 == pytest.approx(costs.rows_s(65) - 6e-4)
    assert costs.cheapest_chunk(beside, 0, 40) == 32
    assert costs.cheapest_chunk(beside, 0, 200) == 200
    assert costs.cheapest_chunk(beside, 0, 30) == 30


def test_the_cost_of_unpacking_is_found_and_is_none_where_nothing_is_unpacked() -> None:
    costs = StepCosts(step_s=4e-3, row_s=(6e-4,) * 2 + (8e-4,) * 3, unpack_s=20e-3, rows=PACKED)
    assert fit(calibrate(costs, 4000), PACKED).unpack_s == pytest.approx(20e-3, rel=0.02)
    assert fit(calibrate(costs, 4000), UNPADDED).unpack_s == 0.0


def test_costs_are_found_where_batches_are_padded_far() -> None:
    costs = StepCosts(step_s=5e-3, row_s=(0.0, 5e-6, 15e-6, 20e-6, 20e-6), rows=GPU_ROWS)
    found = fit(calibrate(costs, 4000), GPU_ROWS)
    shape = step_shape(num_decodes=70, context=100, chunk=300)
    assert found.seconds(shape) == pytest.approx(costs.seconds(shape), rel=0.01)
    assert found.rows_s(370) == found.rows_s(384) < found.rows_s(385)


@given(num_tokens=st.integers(0, 2500))
def test_each_row_that_is_computed_costs_by_its_segment(num_tokens: int) -> None:
    slopes = (1.0, 10.0, 100.0, 1000.0, 10000.0)
    rows = range(1, CPU_ROWS.padded(num_tokens) + 1)
    expected = sum(slopes[bisect_left(ROW_BOUNDS, row)] for row in rows)
    assert StepCosts(step_s=0.0, row_s=slopes).rows_s(num_tokens) == expected


@pytest.mark.parametrize(
    ("row_s", "step_s"), [((0.0,) * 4, 1.0), ((0.0,) * 5, -1.0), ((0, 0, 0, 0, -1.0), 1.0)]
)
def test_costs_that_cannot_be_are_refused(row_s: tuple[float, ...], step_s: float) -> None:
    with pytest.raises(ConfigError):
        StepCosts(step_s=step_s, row_s=row_s)


def test_the_shape_of_a_plan() -> None:
    """A decode at 9, the last three tokens of a prompt of 8, and a chunk in the middle of one."""
    plan = StepPlan(
        step_id=0,
        chunks=(
            ScheduledChunk("a", 9, 1, (), 1, "decode"),
            ScheduledChunk("b", 5, 3, (), 1, "prefill"),
            ScheduledChunk("c", 4, 2, (), 0, "prefill"),
            ScheduledChunk("d", 4, 1, (), 0, "prefill"),
        ),
    )
    shape = StepShape.of(plan)
    assert (shape.num_decode_rows, shape.decode_context) == (1, 10)
    assert (shape.num_prefill_chunks, shape.num_prefill_tokens) == (3, 6)
    assert shape.prefill_area == (6 + 7 + 8) + (5 + 6) + 5
    assert shape.prefill_context == 8 + 6 + 5
    assert (shape.num_samples, shape.num_tokens) == (2, 7)


def test_a_decode_that_is_removed_leaves_no_trace() -> None:
    shape = step_shape(num_decodes=2, context=7, chunk=5)
    shape.add_decode(11)
    shape.remove_decode(11)
    unchanged = step_shape(num_decodes=2, context=7, chunk=5)
    assert features(shape) == features(unchanged)


@given(context=st.integers(1, 3000), count=st.integers(1, 20))
def test_each_draft_reads_the_keys_before_it(context: int, count: int) -> None:
    shape = StepShape()
    shape.add_decode(context)
    decode = shape.copy()
    shape.add_drafts(context, count)
    assert shape.num_tokens == decode.num_tokens + count
    assert shape.num_draft_rows == count
    assert shape.num_samples == 1 + count
    assert shape.draft_context == sum(context + depth for depth in range(1, count + 1))
    assert shape.decode_context == context
    one_by_one = decode.copy()
    for depth in range(count):
        one_by_one.add_drafts(context + depth, 1)
    assert features(one_by_one) == pytest.approx(features(shape))
