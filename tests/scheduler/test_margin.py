"""How the margin follows the errors of steps."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.scheduler.margin import Margin
from tests.profiles import examples


def observe(margin: Margin, errors: Sequence[float]) -> int:
    """How many were beyond the margin."""
    num_beyond = 0
    for error in errors:
        num_beyond += error > margin.value
        margin.observe(error)
    return num_beyond


def quiet(num_steps: int, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(0.0, 0.03) for _ in range(num_steps)]


def phases() -> st.SearchStrategy[list[list[float]]]:
    """Errors of a machine that changes: (level, spread, steps, seed) of each phase."""

    def errors(level: float, spread: float, num_steps: int, seed: int) -> list[float]:
        rng = random.Random(seed)
        return [min(1.0, rng.uniform(level, level + spread)) for _ in range(num_steps)]

    phase = st.builds(
        errors, st.floats(-0.3, 1.0), st.floats(0.0, 0.5), st.integers(1, 800), st.integers(0, 99)
    )
    return st.lists(phase, min_size=1, max_size=8)


@given(phases=phases(), quantile=st.sampled_from([0.9, 0.99, 0.999]))
@examples(60)
def test_few_are_beyond_it_whatever_the_errors_do(
    phases: list[list[float]], quantile: float
) -> None:
    """The guarantee of conformal control: a tenth of what the promise allows, and a bounded number,
    which is what the integral takes to reach the largest of the errors."""
    errors = [error for phase in phases for error in phase]
    allowed = 0.1 * (1.0 - quantile) * len(errors)
    assert observe(Margin(quantile), errors) <= allowed + 12


def test_an_interruption_widens_it_at_once_and_quiet_gives_it_back() -> None:
    margin = Margin()
    observe(margin, quiet(1000))
    assert margin.value < 0.2
    margin.observe(0.5)
    assert margin.value > 0.55
    observe(margin, quiet(2500, seed=1))
    assert margin.value < 0.2


def test_as_long_as_little_is_known_an_interruption_is_expected() -> None:
    margin = Margin()
    assert margin.value >= 0.5
    observe(margin, quiet(499))
    assert margin.value >= 0.5
    observe(margin, quiet(1))
    assert margin.value < 0.2


def test_a_higher_quantile_misses_less() -> None:
    rng = random.Random(0)
    errors = [rng.expovariate(10.0) for _ in range(20_000)]
    missed = [observe(Margin(quantile), errors) for quantile in (0.9, 0.99, 0.999)]
    assert missed[0] > 3 * missed[1] > 9 * missed[2]


def test_what_no_margin_covers_is_not_counted() -> None:
    margin, rng = Margin(), random.Random(0)
    observe(margin, [5.0 if rng.random() < 0.02 else error for error in quiet(2000)])
    assert margin.value < 0.2


def test_a_margin_that_keeps_prefill_out_is_forgotten() -> None:
    margin = Margin()
    observe(margin, [0.9] * 1000)
    assert margin.value > 0.9
    for _ in range(1000):
        margin.expire()
    assert margin.value < 0.1


@pytest.mark.parametrize("quantile", [0.9, 0.999])
def test_another_quantile_goes_by_the_same_errors(quantile: float) -> None:
    margin = Margin()
    observe(margin, [*quiet(500), *[0.4] * 500])
    margin.promise(quantile)
    assert margin.value >= 0.4
