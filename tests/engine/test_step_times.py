"""Which step times an engine begins with, and what it keeps of them at its end."""

from collections.abc import Callable
from pathlib import Path

import pytest

from legato.core.config import EngineConfig
from legato.core.rows import CPU_ROWS
from legato.engine.calibration import disturbance
from legato.engine.calibration.calibration import Calibration
from legato.engine.calibration.step_times import KnownSteps, StepTimes
from legato.executor.simulated import SimulatedExecutor, VirtualClock
from legato.kv.manager import KVCacheManager
from legato.scheduler.cost_fit import MeasuredStep
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_time import StepTimeModel
from tests.engine.test_calibration import COSTS
from tests.scheduler.step_times import calibrate
from tests.scheduler.test_step_time import run, steadily

MEASURED = calibrate(COSTS, 4000)
OTHER = StepCosts(step_s=0.02, row_s=(1e-4,) * 5, decode_row_s=8e-3)


@pytest.fixture
def step_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., StepTimes]:
    """Make those of one more engine, which measures `steps`."""
    monkeypatch.setattr(disturbance, "MOST_WAITED", float("inf"))  # the tests' machine is busy

    def make(steps: list[MeasuredStep] = MEASURED, *, calibrate: bool = True) -> StepTimes:
        monkeypatch.setattr(Calibration, "run", lambda *_: steps)
        config = EngineConfig.of(
            max_num_seqs=40,
            max_num_batched_tokens=512,
            itl_slo_s=0.1,
            calibration_dir=str(tmp_path),
            calibrate=calibrate,
        )
        return StepTimes(
            SimulatedExecutor(VirtualClock(), lambda _: 0.01),
            KVCacheManager(1000, 16),
            config=config,
            measured_on={"model": "a"},
            device_type="cpu",
            rows=CPU_ROWS,
            max_model_len=4000,
            vocab_size=100,
        )

    return make


def is_measured_again(times: StepTimes, model: StepTimeModel, known: KnownSteps) -> bool:
    recalibration = times.recalibration(model, known)
    return recalibration is not None and recalibration.wait_s is not None


def serve(times: StepTimes, costs: StepCosts, factor: float = 1.0) -> StepTimeModel:
    """Run 200 steps of an engine, and let it end."""
    model = StepTimeModel(times.known().steps)
    run(model, 200, steadily(factor), costs=costs)
    times.keep_learned(model)
    return model


def test_what_was_measured_is_kept_with_what_was_learned(
    step_times: Callable[..., StepTimes],
) -> None:
    first = step_times()
    assert len(first.known().steps) == len(MEASURED)
    serve(first, COSTS)
    known = step_times([]).known()
    assert len(known.steps) == len(MEASURED)
    assert known.tails is not None
    assert known.tails.body
    assert not is_measured_again(first, StepTimeModel(known.steps), known)


@pytest.mark.parametrize(
    "steps", [MEASURED[:5], [s for s in MEASURED if not s[0].num_decode_rows]], ids=len
)
def test_a_measurement_that_lacks_steps_is_neither_used_nor_kept(
    steps: list[MeasuredStep],
    step_times: Callable[..., StepTimes],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    times = step_times(steps)
    known = times.known()
    assert known.trusted == []
    assert "not used" in caplog.text
    assert not list(tmp_path.iterdir())
    assert is_measured_again(times, StepTimeModel(), known)


def test_measurements_that_service_contradicts_go_and_are_made_again(
    step_times: Callable[..., StepTimes], tmp_path: Path
) -> None:
    times = step_times()
    known = times.known()
    model = StepTimeModel(known.steps)
    recalibration = times.recalibration(model, known)
    assert recalibration is not None
    run(model, 99, steadily(), costs=OTHER)
    assert recalibration.wait_s is None
    run(model, 1, steadily(), costs=OTHER)
    assert recalibration.wait_s is not None
    assert list(tmp_path.iterdir())
    times.keep_learned(model)
    assert not list(tmp_path.iterdir())
    assert times.recalibration(model, KnownSteps([])) is None
    off = step_times(calibrate=False)
    assert off.recalibration(model, known) is None


def test_a_slower_machine_leaves_the_measurements_as_they_were(
    step_times: Callable[..., StepTimes], tmp_path: Path
) -> None:
    times = step_times()
    times.known()
    [file] = tmp_path.iterdir()
    before = file.read_bytes()
    assert serve(times, COSTS, 3.0).prior_verdict == "scaled"
    assert file.read_bytes() == before


def test_only_the_measurements_that_were_wrong_are_removed(
    step_times: Callable[..., StepTimes], tmp_path: Path
) -> None:
    """Another engine has measured again meanwhile."""
    times = step_times()
    model = StepTimeModel(times.known().steps)
    run(model, 100, steadily(), costs=OTHER)
    other = step_times(again := calibrate(OTHER, 4000))
    other.measure(other.calibration())
    times.keep_learned(model)
    assert model.prior_verdict == "wrong"
    assert len(step_times([]).known().steps) == len(again)
    assert len(list(tmp_path.iterdir())) == 1
