"""How long simulated steps take, and what is believed of it."""

import pytest

from legato.core.plan import ScheduledChunk, StepPlan
from legato.scheduler.cost_fit import fit
from legato.scheduler.step_shape import StepShape
from legato_lab.simulation.profiled_server import Truth, calibrate
from tests.lab.simulated import CPU

PLAN = StepPlan(
    step_id=0,
    chunks=(
        ScheduledChunk("decode", 999, 1, (), 1, "decode"),
        ScheduledChunk("prefill", 512, 256, (), 0, "prefill"),
    ),
)
BELIEVED_S = CPU.costs.seconds(StepShape.of(PLAN))


def durations_s(*, error: float, noise: float, seed: int = 0) -> list[float]:
    truth = Truth(CPU.costs, error=error, noise=noise, seed=seed)
    return [truth.step_time_s(PLAN) for _ in range(200)]


def test_without_error_and_noise_it_is_what_is_believed() -> None:
    assert durations_s(error=0.0, noise=0.0) == [BELIEVED_S] * 200


def test_the_error_is_the_same_for_all_steps() -> None:
    assert len(set(durations_s(error=0.1, noise=0.0))) == 1
    means_s = {durations_s(error=0.1, noise=0.0, seed=seed)[0] for seed in range(20)}
    assert len(means_s) == 20
    assert all(abs(mean_s / BELIEVED_S - 1.0) <= 0.1 for mean_s in means_s)


def test_noise_differs_from_step_to_step() -> None:
    noisy_s = durations_s(error=0.0, noise=0.05)
    assert len(set(noisy_s)) == 200
    assert 0.8 * BELIEVED_S < min(noisy_s) < BELIEVED_S < max(noisy_s) < 1.25 * BELIEVED_S


@pytest.mark.parametrize("max_model_len", [2, 64, 8192])
def test_a_calibration_covers_every_kind_of_step(max_model_len: int) -> None:
    steps = calibrate(CPU.costs, max_model_len=max_model_len, max_num_seqs=64, noise=0.0, seed=0)
    costs = fit(steps)
    for shape, seconds in steps:
        assert costs.seconds(shape) == pytest.approx(seconds, rel=0.02)
