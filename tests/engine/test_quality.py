"""Whether a calibration beside other programs is told from one that had the machine to itself."""

import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from psutil import cpu_count

from legato.cli.main import main
from legato.core.plan import StepPlan
from legato.core.rows import CPU_ROWS
from legato.engine.calibration import calibration, disturbance
from legato.engine.calibration.calibration import Calibration
from legato.engine.calibration.disturbance import MOST_ERROR, CoreWait, Quality
from legato.executor.simulated import SimulatedExecutor, VirtualClock
from legato.scheduler.cost_fit import fit
from legato.scheduler.step_shape import StepShape
from legato_lab.simulation.profiles import load_profile
from tests.engine.test_calibration import COSTS
from tests.scheduler.step_times import step_shape

TYPICAL = [
    step_shape(num_decodes=num_decodes, context=500, chunk=chunk, start=500)
    for num_decodes in (1, 8, 40)
    for chunk in (0, 64, 200, 500)
]


@contextmanager
def busy_machine() -> Iterator[None]:
    """A loop for each core."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def calibrated_beside(share: float, factor: float, seed: int = 0) -> tuple[Quality, list[float]]:
    """On a machine where a share of the steps take `factor` times as long.

    Returns:
        Its quality, where no wait is counted, and predicted over true durations.
    """
    rng, clock = random.Random(seed), VirtualClock()

    def seconds(plan: StepPlan) -> float:
        slowdown = factor if rng.random() < share else rng.gauss(1.0, 0.03)
        return slowdown * COSTS.seconds(StepShape.of(plan))

    steps = Calibration(
        SimulatedExecutor(clock, seconds),
        block_ids=range(1000),
        block_size=16,
        max_model_len=8192,
        max_num_seqs=64,
        vocab_size=100,
        clock=clock,
    ).run(lambda _: None)
    costs = fit(steps)
    return Quality.of(steps, CPU_ROWS, 0.0), [costs.seconds(s) / COSTS.seconds(s) for s in TYPICAL]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("factor", [1.5, 2.0, 4.0])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6])
def test_what_slows_some_steps_is_told_or_does_no_harm(
    share: float, factor: float, seed: int
) -> None:
    told, ratios = calibrated_beside(share, factor, seed)
    assert told.doubt or all(0.85 < ratio < 1.15 for ratio in ratios)
    if share == 0.0:
        assert not told.doubt


def test_what_slows_all_steps_alike_is_told_by_the_waiting() -> None:
    told, ratios = calibrated_beside(1.0, 2.0)
    assert min(ratios) > 1.9
    assert told.p95_error < MOST_ERROR
    assert "waited" in Quality(median_error=0.01, p95_error=0.02, disturbed=0.0, waited=0.5).doubt


def test_a_thread_waits_where_all_cores_are_busy() -> None:
    with busy_machine():
        wait = CoreWait()
        while wait.share <= 0.0:
            sum(range(10**6))
    assert wait.share > 0.0


def test_where_waiting_is_not_counted_others_and_idle_cores_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = iter([(100.0, 50.0), (100.0, 53.0), (110.0, 53.5)])
    monkeypatch.setattr("legato.engine.calibration.disturbance._waits_s", dict)
    monkeypatch.setattr("legato.engine.calibration.disturbance._machine_s", lambda: next(machine))
    wait = CoreWait()
    assert wait.share > 0.0  # others had three seconds, and nothing was idle
    assert wait.share == 0.0


@pytest.fixture
def calibrate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """`legato calibrate -o profile.json`, in a fifth of its time; returns the exit status."""
    monkeypatch.setattr(calibration, "CALIBRATION_S", 2.0)
    monkeypatch.setattr(calibration, "_FILL_S", 1.0)
    flags = (
        *("calibrate", "--num-threads", "1", "--kv-cache-memory", "256M"),
        *("--calibration-dir", str(tmp_path / "kept"), "-o", str(tmp_path / "profile.json")),
    )
    return lambda: main([*flags])


def test_calibrate_beside_busy_loops_says_no(
    tmp_path: Path, calibrate: Callable[[], int], capsys: pytest.CaptureFixture[str]
) -> None:
    with busy_machine():
        assert calibrate() == 1
    assert "not kept" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_what_calibrate_measures_undisturbed_is_kept_and_a_profile(
    tmp_path: Path, calibrate: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("MOST_ERROR", "MOST_DISTURBED", "MOST_WAITED"):  # the tests' machine is busy
        monkeypatch.setattr(disturbance, limit, math.inf)
    assert calibrate() == 0
    [kept] = (tmp_path / "kept").iterdir()
    assert kept.read_bytes() == (tmp_path / "profile.json").read_bytes()
    profile = load_profile(str(kept))
    assert profile.figures == "measured"
    assert profile.max_model_len == 8192
    assert 8192 <= profile.kv_cache_tokens < 20_000  # 256 MiB, at 23 kB a token
    assert profile.costs == fit(profile.steps, profile.costs.rows)
