"""Whether the costs of a machine are found again from its steps."""

import itertools
import random
import statistics

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.optimize import nnls

from legato.scheduler import cost_fit
from legato.scheduler.cost_fit import CostFit, MeasuredStep, disturbed, fit, solve_nonnegative
from legato.scheduler.step_costs import NUM_TERMS, ROW_BOUNDS, StepCosts
from tests.profiles import examples
from tests.scheduler.step_times import calibrate, step_shape, true_costs

MAX_LEN = 4000

RIDGE_BIAS = 1e-4
"""Relative error that the small ridge, which makes every fit solvable, may cost."""


def errors(costs: StepCosts, steps: list[MeasuredStep]) -> list[float]:
    return [abs(costs.seconds(shape) / seconds - 1.0) for shape, seconds in steps]


@given(costs=true_costs())
@examples(50)
def test_steps_without_noise_are_predicted(costs: StepCosts) -> None:
    steps = calibrate(costs, MAX_LEN)
    assert max(errors(fit(steps), steps)) < RIDGE_BIAS


@given(costs=true_costs(), seed=st.integers(0, 2**16))
@examples(50)
def test_interrupted_steps_hardly_matter(costs: StepCosts, seed: int) -> None:
    rng = random.Random(seed)
    steps = calibrate(costs, MAX_LEN)
    noisy = [(shape, seconds * rng.gauss(1.0, 0.03)) for shape, seconds in steps]
    for index in rng.sample(range(len(noisy)), len(noisy) // 20):
        noisy[index] = noisy[index][0], 3.0 * noisy[index][1]
    assert statistics.median(errors(fit(noisy), steps)) < 0.02
    assert disturbed(noisy, fit(noisy)) == pytest.approx(1 / 20, abs=0.02)


@given(costs=true_costs())
@examples(20)
def test_running_sums_find_what_a_fit_of_all_steps_does(costs: StepCosts) -> None:
    steps = calibrate(costs, MAX_LEN)
    running = CostFit()
    for shape, seconds in steps:
        running.add(shape, seconds, weight=1.0)
    assert max(errors(running.solve(), steps)) < RIDGE_BIAS


def test_a_calibration_does_not_fade() -> None:
    """Years of decodes do not make the cost of prefill unknown."""
    costs = StepCosts(step_s=0.01, row_s=(1e-4,) * 5, decode_row_s=1e-4, area_s=1e-7)
    steps = calibrate(costs, MAX_LEN)
    decodes = [step for step in steps if not step[0].num_prefill_chunks]
    prior, none = CostFit(steps), CostFit()
    for shape, seconds in decodes * 300:
        prior.add(shape, seconds, weight=1.0)
        none.add(shape, seconds, weight=1.0)
    assert max(errors(prior.solve(), steps)) < 1e-3
    assert max(errors(none.solve(), decodes)) < 1e-3
    assert max(errors(none.solve(), steps)) > 0.1


def test_a_cost_without_steps_stays_known_when_its_sums_have_faded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After 350,000 steps they are no numbers of full precision any more; here after 14,000."""
    monkeypatch.setattr(cost_fit, "_FORGETTING", 0.95)
    costs = StepCosts(step_s=0.01, row_s=(1e-4,) * 5, decode_row_s=1e-4, area_s=1e-7)
    steps = calibrate(costs, MAX_LEN)
    decodes = [step for step in steps if not step[0].num_prefill_chunks]
    running = CostFit()
    for shape, seconds in steps:
        running.add(shape, seconds, weight=1.0)
    running.solve()
    for count, (shape, seconds) in enumerate(itertools.islice(itertools.cycle(decodes), 20_000)):
        running.add(shape, seconds, weight=1.0)
        if count % 1000 == 0:
            running.solve()
    assert max(errors(running.solve(), steps)) < 0.1


@given(costs=true_costs(), cut=st.sampled_from(range(len(ROW_BOUNDS))), seed=st.integers(0, 99))
@examples(30)
def test_a_segment_without_data_goes_on_as_the_last_one(
    costs: StepCosts, cut: int, seed: int
) -> None:
    """A machine that is too slow to be calibrated up to its longest steps."""
    rng, bound = random.Random(seed), ROW_BOUNDS[cut]
    steps = [
        (shape, seconds * rng.gauss(1.0, 0.02))
        for shape, seconds in calibrate(costs, MAX_LEN)
        if shape.num_tokens <= bound
    ]
    found = fit(steps)
    assert found.row_s[cut + 1 :] == pytest.approx((found.row_s[cut],) * (4 - cut), rel=1e-4)
    times_s = [found.rows_s(num_tokens) for num_tokens in range(0, 4096, 16)]
    assert times_s == sorted(times_s)
    if found.row_s[cut]:
        assert found.rows_s(4096) - found.rows_s(2048) == pytest.approx(
            2048 * found.row_s[cut], rel=1e-3
        )


def test_data_decide_what_a_segment_costs_once_there_are_any() -> None:
    """So long steps may have been left out of a calibration: a few of them are enough."""
    costs = StepCosts(step_s=0.01, row_s=(1e-5, 1e-4, 2e-4, 5e-4, 1e-4))
    steps = calibrate(costs, MAX_LEN)
    short = CostFit([step for step in steps if step[0].num_tokens <= 256])
    assert short.solve().row_s[3:] == pytest.approx((2e-4, 2e-4), rel=1e-3)
    for chunk in (900, 1000, 3000, 4000):
        shape = step_shape(chunk=chunk)
        short.add(shape, costs.seconds(shape), weight=1.0)
    assert short.solve().row_s == pytest.approx(costs.row_s, rel=1e-2)


@given(seed=st.integers(0, 2**32), num_rows=st.integers(1, 40), size=st.integers(1, NUM_TERMS))
@example(seed=1457, num_rows=26, size=14)
@examples(100)
def test_sums_are_solved_as_scipy_solves_rows(seed: int, num_rows: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.random((num_rows, size)) * 10 ** rng.uniform(-2, 2, size)
    rows[:, 0] = rows[:, -1]  # what cannot be told apart
    target = rows @ np.maximum(rng.normal(size=size), 0.0) + 0.1 * rng.normal(size=num_rows)
    scale = np.sqrt(np.diag(rows.T @ rows))
    rows = np.vstack([rows / scale, 1e-3 * np.eye(size)])
    target = np.concatenate([target, np.zeros(size)])
    found = solve_nonnegative(rows.T @ rows, rows.T @ target)
    expected, residual = nnls(rows, target)
    assert found.min() >= 0.0
    # Sums of squares are rounded at the size of the target, far above that of the residual.
    rounded = 1e-10 * np.linalg.norm(target) + 1e-12
    assert np.linalg.norm(rows @ found - target) <= residual * (1 + 1e-9) + rounded
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-3 * expected.max(initial=1e-6))
