"""Machines that can be simulated."""

from pathlib import Path

import msgspec
import pytest

from legato.bench.simulation.profiled_server import calibrate
from legato.bench.simulation.profiles import PROFILES, Profile, load_profile
from legato.core.errors import ConfigError
from legato.engine.startup.calibration_file import CalibrationFile
from legato.scheduler.step_shape import StepShape
from tests.bench.simulated import CPU


def test_a_calibration_file_is_a_profile(tmp_path: Path) -> None:
    steps = calibrate(CPU.costs, max_model_len=8192, max_num_seqs=64, noise=0.0, seed=0)
    file = CalibrationFile(str(tmp_path), {"model": "m"})
    file.save(steps)
    costs = load_profile(str(file.path)).costs
    assert all(costs.seconds(shape) == pytest.approx(s, rel=0.02) for shape, s in steps)


@pytest.mark.parametrize("text", ["", "{}", '{"steps": [[{"no_such_count": 1}, 0.1]]}'])
def test_files_that_are_no_calibration(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="as a calibration"):
        load_profile(str(path))


def test_unknown_profiles_are_told_what_there_is() -> None:
    with pytest.raises(ConfigError, match="smollm2-135m-cpu"):
        load_profile("smollm")


def test_a_cache_too_small_for_one_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        msgspec.structs.replace(CPU, kv_cache_tokens=CPU.max_model_len - 1)


@pytest.fixture
def h100() -> Profile:
    return PROFILES["llama-3-8b-h100"]


def test_an_h100_reads_its_weights_and_multiplies_in_about_the_published_times(
    h100: Profile,
) -> None:
    """16 GB at 3.35 TB/s are 4.8 ms, and 16 GFLOP a token at 989 TFLOP/s 16 µs, at best."""
    assert 4.8e-3 < h100.costs.step_s < 7e-3
    prompt = StepShape()
    prompt.add_prefill(0, 4096, samples=True)
    assert 16e-6 < h100.costs.seconds(prompt) / 4096 < 32e-6
