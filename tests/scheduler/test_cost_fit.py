"""Whether the costs of a machine are found again from its steps."""

import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from legato.scheduler.cost_fit import CostFit, MeasuredStep, disturbed, fit
from legato.scheduler.nonnegative import solve_nonnegative
from legato.scheduler.step_costs import NUM_TERMS, StepCosts
from tests.profiles import examples
from tests.scheduler.step_times import calibrate, true_costs

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


def test_what_is_not_seen_costs_nothing_rather_than_less() -> None:
    costs = StepCosts(step_s=0.01, row_s=(1e-4,) * 5)
    found = fit([step for step in calibrate(costs, MAX_LEN) if step[0].num_tokens < 10])
    assert min(found.vector) >= 0.0
    assert found.row_s[1:] == pytest.approx((0.0,) * 4, abs=1e-9)


@given(seed=st.integers(0, 2**32), num_rows=st.integers(1, 40), size=st.integers(1, NUM_TERMS))
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
    assert np.linalg.norm(rows @ found - target) <= residual * (1 + 1e-9) + 1e-12
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6 * expected.max(initial=1e-6))
