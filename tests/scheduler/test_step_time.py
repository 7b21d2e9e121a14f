"""Whether the belief about step times follows the machine, and how sure it is of itself."""

import math
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.rows import CPU_ROWS, GPU_ROWS
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel
from tests.profiles import examples
from tests.scheduler.step_times import calibrate, noise_of, steady_model, step_shape, true_costs

MAX_LEN = 4000
COSTS = StepCosts(
    step_s=0.01,
    row_s=(1e-4,) * 5,
    decode_row_s=1e-4,
    decode_context_s=1e-7,
    chunk_s=1e-3,
    area_s=1e-8,
    sample_s=1e-4,
)

Noise = Callable[[], float]


def traffic(rng: random.Random, *, has_prefill: bool = True) -> Iterator[StepShape]:
    """Decodes, and in four of five steps a chunk beside them."""
    while True:
        yield step_shape(
            num_decodes=rng.randint(1, 40),
            context=rng.randint(1, MAX_LEN),
            chunk=rng.randint(1, 500) if has_prefill and rng.random() < 0.8 else 0,
            start=rng.randint(0, MAX_LEN),
            samples=rng.random() < 0.2,
        )


def run(
    model: StepTimeModel,
    num_steps: int,
    noise: Noise,
    *,
    costs: StepCosts = COSTS,
    has_prefill: bool = True,
) -> None:
    shapes = traffic(random.Random(num_steps), has_prefill=has_prefill)
    for _ in range(num_steps):
        shape = next(shapes)
        model.observe(shape, costs.seconds(shape) * noise())


def worst_error(model: StepTimeModel, speed: float = 1.0, costs: StepCosts = COSTS) -> float:
    """Relative, over 200 steps to come on a machine that takes `speed` times as long."""
    shapes = traffic(random.Random(0))
    steps = [next(shapes) for _ in range(200)]
    return max(abs(model.seconds(s) / (speed * costs.seconds(s)) - 1.0) for s in steps)


def steadily(factor: float = 1.0) -> Noise:
    return lambda: factor


def spread(sigma: float, seed: int = 0) -> Noise:
    rng = random.Random(seed)
    return lambda: max(0.1, rng.gauss(1.0, sigma))


@given(costs=true_costs())
@examples(20)
def test_without_a_calibration_32_steps_teach_enough(costs: StepCosts) -> None:
    model = StepTimeModel()
    run(model, 31, steadily(), costs=costs)
    assert not model.is_known
    run(model, 1, steadily(), costs=costs)
    assert model.is_known
    run(model, 96, steadily(), costs=costs)
    assert worst_error(model, costs=costs) < 0.1


def test_a_calibration_is_believed_at_once() -> None:
    model = StepTimeModel(calibrate(COSTS, MAX_LEN))
    assert model.is_known
    assert worst_error(model) < 1e-3


@pytest.mark.parametrize("num_steps_before", [0, 600])
@pytest.mark.parametrize("speed", [2.0, 0.5])
def test_a_machine_that_changes_its_speed_is_followed(speed: float, num_steps_before: int) -> None:
    model = StepTimeModel(calibrate(COSTS, MAX_LEN))
    run(model, num_steps_before, spread(0.03))
    run(model, 150, steadily(speed))
    assert worst_error(model, speed) < 0.1


@pytest.mark.parametrize("factor", [1.5, 5.0])
def test_interruptions_do_not_pass_for_a_slower_machine(factor: float) -> None:
    model = StepTimeModel(calibrate(COSTS, MAX_LEN))
    rng = random.Random(0)
    run(model, 2000, lambda: factor if rng.random() < 0.03 else 1.0)
    assert worst_error(model) < 0.1


@pytest.mark.parametrize("is_calibrated", [True, False])
def test_costs_stay_known_after_long_without_such_steps(is_calibrated: bool) -> None:
    """Under any noise of the decodes that run meanwhile, and at the machine's new speed."""
    rng = random.Random(0)
    shapes = [step_shape(num_decodes=8, context=1000, chunk=c, start=3000) for c in (200, 500, 900)]
    model = StepTimeModel(calibrate(COSTS, MAX_LEN) if is_calibrated else ())
    run(model, 600, spread(0.03))
    for speed in (1.0, 1.5):

        def noise(speed: float = speed) -> float:
            is_interrupted = rng.random() < 0.03
            return speed * (rng.uniform(1.5, 4.0) if is_interrupted else rng.gauss(1.0, 0.1))

        run(model, 20_000, noise, has_prefill=False)
        ratios = [model.seconds(shape) / (speed * COSTS.seconds(shape)) for shape in shapes]
        assert ratios == pytest.approx([1.0] * 3, rel=0.1 if is_calibrated else 0.2)


def test_the_scale_does_not_drift_until_it_overflows() -> None:
    """With ordinary noise that took days; with this, less than a minute."""
    shape, rng = step_shape(num_decodes=4, context=100), random.Random(0)
    model = StepTimeModel()
    for _ in range(60_000):
        model.observe(shape, COSTS.seconds(shape) * rng.lognormvariate(0.0, 2.0))
        assert not model.is_known or model.seconds(shape) > 0.0  # false of nan
    for _ in range(10_000):
        model.observe(shape, COSTS.seconds(shape))
    assert model.seconds(shape) == pytest.approx(COSTS.seconds(shape), rel=0.05)


@given(
    measured=st.lists(
        st.tuples(
            st.floats() | st.floats(1e-4, 1.0),
            st.none() | st.floats(),
            st.none() | st.floats(0.0, 1.0),
        ),
        max_size=60,
    ),
    is_calibrated=st.booleans(),
)
@examples(100)
def test_no_measurement_unmakes_the_belief(
    measured: list[tuple[float, float | None, float | None]], is_calibrated: bool
) -> None:
    """Neither nan nor infinite, negative or tiny ones."""
    calibration = [*calibrate(COSTS, MAX_LEN), (step_shape(num_decodes=1), math.nan)]
    model = StepTimeModel(calibration if is_calibrated else ())
    shapes = traffic(random.Random(0))
    for shape, (seconds, delivered_s, limit_s) in zip(shapes, measured * 3, strict=False):
        model.observe(shape, seconds, delivered_s, limit_s)
        if model.is_known:
            assert 0.0 < model.seconds(shape) < math.inf
            assert 1.0 <= model.safety_factor(0.05) < math.inf
            assert 0 <= model.longest_chunk(shape, 100, 0.05, 500) <= 500


def test_the_margin_is_of_what_was_delivered() -> None:
    model = StepTimeModel(calibrate(COSTS, MAX_LEN))
    shapes = traffic(random.Random(0))
    for shape in (next(shapes) for _ in range(1500)):
        seconds = COSTS.seconds(shape)
        model.observe(shape, seconds, delivered_s=1.25 * seconds)
    assert worst_error(model) < 0.1
    assert 0.25 < model.margin < 0.35


def test_what_makes_no_full_step_late_widens_no_margin() -> None:
    model = StepTimeModel(calibrate(COSTS, MAX_LEN))
    shapes = traffic(random.Random(0))
    for shape in (next(shapes) for _ in range(1500)):
        seconds = COSTS.seconds(shape)
        # A step of a quarter of what is allowed takes twice as long.
        model.observe(shape, seconds, delivered_s=2.0 * seconds, limit_s=4.0 * seconds)
    assert 0.28 < model.margin < 0.42


def test_a_slowdown_is_noticed_at_its_first_steps_and_forgotten_when_it_is_over() -> None:
    model = StepTimeModel(calibrate(COSTS, MAX_LEN))
    run(model, 600, spread(0.03))
    assert model.slowdown < 1.1
    run(model, 3, steadily(4.0))
    assert model.slowdown > 1.3
    run(model, 20, steadily(4.0))
    assert model.slowdown > 2.0
    model.forget_present()
    assert model.slowdown == 1.0


@pytest.mark.parametrize("pause_s", [0.2, 1.0, 60.0, 3600.0])
@pytest.mark.parametrize("num_steps_before", [0, 5, 600])
def test_a_pause_of_the_machine_is_no_slowdown(pause_s: float, num_steps_before: int) -> None:
    """As when a laptop is closed, or all processes are stopped: in the first step, or later."""
    model = StepTimeModel(calibrate(COSTS, MAX_LEN))
    run(model, num_steps_before, spread(0.03))
    shape = step_shape(num_decodes=8, context=100)
    usual_s, safety_factor = model.seconds(shape), model.safety_factor(0.1)
    model.observe(shape, COSTS.seconds(shape) + pause_s, limit_s=0.1)
    assert model.slowdown < 1.15
    assert model.seconds(shape) == pytest.approx(usual_s, rel=0.03)
    assert model.safety_factor(0.1) < safety_factor + 0.15


def test_rare_pauses_do_not_add_up_to_a_slowdown() -> None:
    model, rng = StepTimeModel(calibrate(COSTS, MAX_LEN)), random.Random(0)
    slowdowns: list[float] = []
    for _ in range(600):
        is_apart = len(slowdowns) % 2 == 0
        run(model, 1, steadily(300.0 if is_apart and rng.random() < 0.02 else 1.0))
        slowdowns.append(model.slowdown)
    assert max(slowdowns) < 1.5
    assert worst_error(model) < 0.1


def test_steps_that_stay_slow_after_a_pause_are_a_slowdown() -> None:
    model = StepTimeModel(calibrate(COSTS, MAX_LEN))
    run(model, 600, spread(0.03))
    run(model, 1, steadily(1000.0))
    run(model, 3, steadily(4.0))
    assert model.slowdown > 1.3
    run(model, 150, steadily(4.0))
    assert worst_error(model, 4.0) < 0.1


@given(
    limit_s=st.sampled_from([0.0, 5e-324, -1.0, 1e300, math.inf, -math.inf, math.nan])
    | st.floats(),
    num_decodes=st.integers(0, 40),
    slowdown=st.sampled_from([1.0, 1e6]),
    drops_rows=st.booleans(),
)
@examples(150)
def test_every_limit_has_an_answer(
    limit_s: float, num_decodes: int, slowdown: float, drops_rows: bool
) -> None:
    model = StepTimeModel(calibrate(COSTS, MAX_LEN), drops_rows=drops_rows)
    run(model, 5, steadily(slowdown))
    shape = step_shape(num_decodes=num_decodes, context=50)
    model.promise(limit_s)
    model.decay_margin(shape, limit_s)
    factors = (
        1.0 + model.margin,
        1.0 + model.margin_at(limit_s),
        model.safety_factor(limit_s),
        model.prefill_safety_factor(shape, limit_s),
        model.slowdown,
    )
    assert all(1.0 <= factor < math.inf for factor in factors)
    longest = model.longest_chunk(shape, 100, limit_s, 500)
    assert 0 <= longest <= 500
    assert limit_s > 0.0 or longest == 0
    shape.add_prefill(0, 100, samples=1)
    deadline = model.deadline(shape, limit_s)
    if deadline is not None:
        assert 0.0 < deadline.layers_s < deadline.late_s < math.inf
        model.observe_deadline(deadline, math.nan, math.inf, 0.0)


OTHER = StepCosts(step_s=0.01, row_s=(1e-4,) * 5, decode_row_s=4e-3, chunk_s=1e-3)
"""Of a machine where a decode costs far more, in comparison with the rest."""


@pytest.mark.parametrize(
    ("truth", "noise", "verdict"),
    [
        (COSTS, spread(0.1), ""),
        (COSTS, noise_of(0), ""),
        (COSTS, steadily(3.0), "scaled"),
        (COSTS, steadily(0.4), "scaled"),
        (OTHER, spread(0.03), "wrong"),
        (OTHER, noise_of(0), "wrong"),
    ],
)
def test_the_first_hundred_steps_judge_a_calibration(
    truth: StepCosts, noise: Noise, verdict: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = StepTimeModel(calibrate(COSTS, MAX_LEN))
    run(model, 99, noise, costs=truth)
    assert not caplog.records
    early = model.prior_verdict
    run(model, 1, noise, costs=truth)
    assert (early, model.prior_verdict) == ("", verdict)
    assert ("measured before" in caplog.text) is bool(verdict)
    if verdict != "scaled":
        assert worst_error(model, costs=truth) < 0.3
    run(model, 500, spread(0.03))
    assert model.prior_verdict == verdict
    model.begin_again(calibrate(COSTS, MAX_LEN))
    assert model.prior_verdict == ""


def test_a_calibration_without_decodes_is_replaced_by_the_steps_in_service() -> None:
    """As of one that was cut short: many decodes cost as much as one token each."""
    costs = StepCosts(step_s=0.02, row_s=(4e-4,) * 5, decode_row_s=0.002, decode_context_s=2e-6)
    prompts = [step for step in calibrate(costs, MAX_LEN) if not step[0].num_decode_rows]
    model = StepTimeModel(prompts)
    run(model, 100, spread(0.03), costs=costs)
    assert model.prior_verdict == "wrong"
    assert worst_error(model, costs=costs) < 0.1


def test_a_busy_machine_does_not_make_a_calibration_wrong() -> None:
    """No costs explain steps that take twice as long at random. Those of others stay known."""
    rng = random.Random(0)
    model = StepTimeModel(calibrate(COSTS, MAX_LEN))
    run(model, 100, lambda: rng.choice((1.0, 2.5)), has_prefill=False)
    assert model.prior_verdict == "scaled"
    long = step_shape(num_decodes=8, context=1000, chunk=900, start=3000)
    assert 0.9 < model.seconds(long) / COSTS.seconds(long) < 2.6


@pytest.mark.parametrize("sigma", [0.02, 0.05, 0.1])
def test_the_margin_covers_99_in_100_steps(sigma: float) -> None:
    model = StepTimeModel(calibrate(COSTS, MAX_LEN))
    run(model, 1500, spread(sigma))
    noise, rng, limit_s = spread(sigma, seed=1), random.Random(1), 0.1
    late: list[bool] = []
    for _ in range(2000):
        num_decodes, start = rng.randint(1, 20), rng.randrange(MAX_LEN)
        beside = step_shape(num_decodes=num_decodes, context=50)
        chunk = model.longest_chunk(beside, start, limit_s, 1000)
        step = step_shape(num_decodes=num_decodes, context=50, chunk=chunk, start=start)
        late.append(COSTS.seconds(step) * noise() > limit_s)
    assert sum(late) / len(late) < 0.01
    assert model.margin_at(limit_s) < 4.0 * sigma + 0.2


@given(
    limit_s=st.floats(0.001, 1.0),
    num_decodes=st.integers(1, 40),
    start=st.integers(0, MAX_LEN),
    sigma=st.floats(0.0, 0.1),
)
@examples(30)
def test_the_longest_chunk_leaves_the_margin(
    limit_s: float, num_decodes: int, start: int, sigma: float
) -> None:
    model = StepTimeModel(calibrate(COSTS, MAX_LEN))
    run(model, 100, spread(sigma))

    def allowed_for_s(num_tokens: int) -> float:
        shape = step_shape(
            num_decodes=num_decodes, context=50, chunk=num_tokens, start=start, samples=True
        )
        return model.seconds(shape) * model.safety_factor(limit_s)

    longest = model.longest_chunk(
        step_shape(num_decodes=num_decodes, context=50), start, limit_s, cap=1000
    )
    assert longest == 0 or allowed_for_s(longest) <= limit_s + 1e-9
    one_more = num_decodes + longest + 1
    is_padded = CPU_ROWS.padded(one_more) > one_more
    assert longest == 1000 or is_padded or allowed_for_s(longest + 1) > limit_s - 1e-9


def test_prompts_that_were_never_seen_are_no_interruptions() -> None:
    """A server without a calibration has decoded for long when its first long prompt comes."""
    model, rng = StepTimeModel(), random.Random(0)
    shapes = [step_shape(chunk=4), *(step_shape(num_decodes=8, context=i) for i in range(400))]
    for shape in shapes:
        model.observe(shape, COSTS.seconds(shape))
    for _ in range(60):
        shape = step_shape(num_decodes=8, context=400, chunk=rng.randint(100, 500), start=1000)
        model.observe(shape, COSTS.seconds(shape))
    shape = step_shape(num_decodes=8, context=400, chunk=400, start=1000)
    assert model.seconds(shape) == pytest.approx(COSTS.seconds(shape), rel=0.1)


def test_a_chunk_that_time_bounds_fills_the_rows_that_are_computed() -> None:
    """512, where 544 would be computed as 640; but not where the prompt, or the budget, ends it."""
    costs = StepCosts(step_s=2e-3, row_s=(20e-6,) * 5, area_s=1e-8, rows=GPU_ROWS)
    model = steady_model(costs, MAX_LEN)
    beside = step_shape(num_decodes=100, context=500)
    assert costs.longest_chunk(beside, 3000, 0.0297 / model.safety_factor(0.0297), 8192) == 444
    assert model.longest_chunk(beside, 3000, 0.0297, 8192) == 512 - 100
    assert model.longest_chunk(beside, 3000, 0.0297, 430) == 430
