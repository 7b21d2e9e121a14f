"""The step-time model of a mixture of experts: its cost grows with the experts that are touched."""

import random

import msgspec
import pytest

from legato.core.rows import CPU_ROWS, ExpertCounts
from legato.scheduler.cost_fit import fit, relative_errors
from legato.scheduler.step_costs import StepCosts, features
from legato.scheduler.step_shape import StepShape
from tests.scheduler.step_times import step_shape

MIXTURE = msgspec.structs.replace(CPU_ROWS, experts=ExpertCounts(32, 4, 24))
COSTS = StepCosts(
    step_s=0.005, row_s=(2e-4,) * 5, decode_row_s=1e-4, chunk_s=1e-3, expert_s=1e-4, rows=MIXTURE
)


def shapes(seed: int) -> list[StepShape]:
    rng = random.Random(seed)
    return [
        step_shape(
            num_decodes=rng.choice([1, 2, 4, 8, 16, 32]),
            context=rng.randint(1, 1000),
            chunk=rng.choice([0, 16, 64, 256]),
            start=rng.randint(0, 1000),
        )
        for _ in range(200)
    ]


def test_touched_experts() -> None:
    one_layer = ExpertCounts(128, 8, 1)
    found = [round(one_layer.touched(count)) for count in (0, 1, 8, 32, 10_000)]
    assert found == [0, 8, 52, 112, 128]
    assert MIXTURE.experts is not None
    assert MIXTURE.experts.touched(1) == pytest.approx(24 * 4)


def test_a_fit_finds_the_cost_of_experts_and_is_as_exact_as_for_dense_models() -> None:
    steps = [(shape, COSTS.seconds(shape)) for shape in shapes(0)]
    costs = fit(steps, MIXTURE)
    assert costs.expert_s == pytest.approx(COSTS.expert_s, rel=0.01)
    later = [(shape, COSTS.seconds(shape)) for shape in shapes(1)]
    assert max(relative_errors(later, costs)) < 0.005
    assert max(relative_errors(later, fit(steps))) > 0.05  # rows alone do not explain it


def test_dense_models_have_no_such_term() -> None:
    dense = msgspec.structs.replace(COSTS, expert_s=0.0, rows=CPU_ROWS)
    steps = [(shape, dense.seconds(shape)) for shape in shapes(0)]
    costs = fit(steps)
    assert costs.expert_s == 0.0
    assert all(features(shape)[7] == 0.0 for shape, _ in steps)


def test_the_longest_chunk_is_the_longest_that_fits() -> None:
    shape = step_shape(num_decodes=2, context=100, chunk=0, start=0)
    for limit_s in (0.01, 0.015, 0.02, 0.03, 0.06):
        longest = COSTS.longest_chunk(shape, 0, limit_s, 1000)
        room_s = limit_s - COSTS.seconds(shape)
        assert longest == 0 or COSTS.chunk_cost_s(shape, 0, longest) <= room_s
        assert COSTS.chunk_cost_s(shape, 0, longest + 1) > room_s
