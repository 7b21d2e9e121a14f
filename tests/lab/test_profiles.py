"""Machines that can be simulated."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from legato.cli.main import main
from legato.core.errors import ConfigError
from legato.engine.calibration.calibration_file import Measurements, shape_counts, write_profile
from legato.scheduler.cost_fit import fit
from legato.scheduler.step_shape import StepShape
from legato_lab.simulation.machine_file import load_machine, write_machine
from legato_lab.simulation.profiled_server import calibrate
from legato_lab.simulation.profiles import PROFILES, load_profile
from legato_lab.simulation.published import rooflines
from tests.lab.simulated import CPU
from tests.lab.tune.machines import CPU as MACHINE
from tests.scheduler.step_times import step_shape


def write(tmp_path: Path, **fields: Any) -> str:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(fields))
    return str(path)


def test_what_calibrate_writes_is_a_profile(tmp_path: Path) -> None:
    steps = calibrate(CPU.costs, max_model_len=8192, max_num_seqs=64, noise=0.0, seed=0)
    told = Measurements(
        steps=[(shape_counts(shape), seconds) for shape, seconds in steps],
        max_model_len=700,
        kv_cache_tokens=9000,
    )
    write_profile(tmp_path / "made" / "profile.json", told)
    source = str(tmp_path / "made" / "profile.json")
    profile, machine = load_profile(source), load_machine(source)
    assert (profile.max_model_len, profile.kv_cache_tokens) == (700, 9000)
    assert (machine.max_model_len, machine.kv_cache_tokens) == (700, 9000)
    for costs in (profile.costs, machine.costs):
        assert all(costs.seconds(shape) == pytest.approx(s, rel=0.02) for shape, s in steps)
    assert len(machine.belief) == len(steps)
    assert machine.errors.quantile(StepShape(), 0.9) == pytest.approx(1.0, abs=0.02)


def test_a_tuned_machine_is_a_profile(tmp_path: Path) -> None:
    write_machine(tmp_path / "machine.json", MACHINE, {})
    profile = load_profile(str(tmp_path / "machine.json"))
    assert profile.costs == MACHINE.costs
    assert profile.delays == MACHINE.delays
    assert profile.kv_cache_tokens == MACHINE.kv_cache_tokens


def test_a_built_in_profile_is_a_machine() -> None:
    machine = load_machine("llama-3-8b-h100")
    assert machine.costs == PROFILES["llama-3-8b-h100"].costs
    believed = fit(machine.belief)
    shape = step_shape(num_decodes=20, context=1000, chunk=300)
    assert believed.seconds(shape) == pytest.approx(machine.costs.seconds(shape), rel=0.1)


def test_costs_may_be_written_by_hand(tmp_path: Path) -> None:
    costs = {"step_s": 0.01, "row_s": [0, 0, 1e-5, 2e-5, 2e-5], "decode_context_s": 1e-8}
    profile = load_profile(write(tmp_path, costs=costs, max_model_len=4096))
    assert profile.costs.seconds(step_shape(num_decodes=3, context=100)) == 0.01 + 300 * 1e-8
    assert (profile.max_model_len, profile.kv_cache_tokens) == (4096, 131_072)


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
GPU = {"memory_bytes": 80e9, "memory_bytes_per_s": 3.35e12, "flops_per_s": 989e12}


@pytest.mark.parametrize("gpu", ["h100", GPU], ids=["named", "written"])
@pytest.mark.parametrize(
    "model", ["llama-3-8b", "config.json", CONFIG], ids=["named", "file", "written"]
)
def test_a_roofline_may_be_written_by_hand(tmp_path: Path, gpu: Any, model: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    told = load_profile(write(tmp_path, roofline={"gpu": gpu, "model": model}))
    known = PROFILES["llama-3-8b-h100"]
    assert told.costs == known.costs
    assert (told.max_model_len, told.kv_cache_tokens) == (8192, known.kv_cache_tokens)


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "no steps, costs, roofline"),
    "a field that there is not": ({"cost": {}}, "`cost`"),
    "a count that there is not": ({"steps": [[{"num_sheep": 1}, 0.1]]}, "num_sheep"),
    "too few slopes": ({"costs": {"step_s": 1, "row_s": [1]}}, "row_s"),
    "twice": (
        {"costs": {"step_s": 1, "row_s": [0] * 5}, "roofline": {"gpu": "h100"}},
        "must have one",
    ),
    "an unknown GPU": ({"roofline": {"gpu": "b9", "model": "llama-3-8b"}}, "no GPU 'b9'"),
    "an unknown model": ({"roofline": {"gpu": "h100", "model": "gpt-5"}}, "'gpt-5' is no"),
    "no model": ({"roofline": {"gpu": "h100"}}, "roofline"),
    "too large": (
        {"roofline": {"gpu": "h100", "model": "llama-3-70b"}},
        "do not fit into the memory of 1 GPUs",
    ),
    "no links": ({"roofline": {"gpu": GPU, "model": CONFIG, "tensor_parallel_size": 2}}, "link"),
    "no efficiency": (
        {"roofline": {"gpu": GPU, "model": CONFIG, "matmul_efficiency": 0}},
        "matmul_efficiency",
    ),
    "a cache too small": (
        {"costs": {"step_s": 1, "row_s": [0] * 5}, "max_model_len": 100, "kv_cache_tokens": 9},
        "does not fit",
    ),
}


@pytest.mark.parametrize(("fields", "message"), BROKEN.values(), ids=BROKEN)
def test_profiles_that_tell_nothing(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_profile(write(tmp_path, **fields))


def test_unknown_profiles_are_told_what_there_is() -> None:
    with pytest.raises(ConfigError, match="smollm2-135m-cpu"):
        load_profile("smollm")


def test_those_built_in_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["simulate", "--profile", "list"])
    assert left.value.code == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == list(PROFILES)
    page = (Path(__file__).parents[2] / "docs" / "reference" / "profiles.md").read_text()
    assert all(f"`{name}`" in page for name in names)


def test_a_cache_too_small_for_one_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        msgspec.structs.replace(CPU, kv_cache_tokens=CPU.max_model_len - 1)


def test_an_h100_reads_its_weights_and_multiplies_in_about_the_published_times() -> None:
    """16 GB at 3.35 TB/s are 4.8 ms, and 16 GFLOP a token at 989 TFLOP/s 16 µs, at best."""
    costs = PROFILES["llama-3-8b-h100"].costs
    assert 4.8e-3 < costs.step_s < 7e-3
    assert 16e-6 < costs.seconds(step_shape(chunk=4096, samples=True)) / 4096 < 32e-6


KERNELS_MS = [
    # The layers of the model, without attention, head and all-reduce: medians that Vidur
    # (Agrawal et al., MLSys 2024) measured and published, tensor parallel as in the name.
    ("llama-3-8b-a100", 1, {1: 9.7, 64: 11.2, 256: 19.5, 1024: 75.1, 4096: 274}),
    ("llama-2-7b-a100", 1, {1: 9.3, 64: 9.7, 256: 17.8, 1024: 67.9, 4096: 258}),
    ("llama-2-7b-h100", 1, {1: 5.6, 64: 5.9, 256: 9.2, 1024: 21.0, 4096: 83.5}),
    ("codellama-34b-a100-tp2", 2, {1: 22.3, 64: 24.0, 256: 43.0, 1024: 170, 4096: 618}),
    ("llama-2-70b-a100-tp4", 4, {1: 24.9, 64: 26.8, 256: 51.0, 1024: 184, 4096: 641}),
    ("llama-2-70b-h100-tp4", 4, {1: 14.3, 64: 15.3, 256: 19.2, 1024: 62.1, 4096: 223}),
]


@pytest.mark.parametrize(("name", "num_gpus", "measured_ms"), KERNELS_MS)
def test_published_figures_are_near_kernels_that_others_measured(
    name: str, num_gpus: int, measured_ms: dict[int, float]
) -> None:
    roofline = rooflines()[name]
    head = msgspec.structs.replace(roofline.model, vocab_size=0)
    gpu = msgspec.structs.replace(roofline.gpu, link_bytes_per_s=1e30)
    layers = msgspec.structs.replace(roofline, model=head, gpu=gpu, all_reduce_s=0.0).costs
    assert roofline.tensor_parallel_size == num_gpus
    for num_tokens, milliseconds in measured_ms.items():
        predicted_ms = 1e3 * (layers.step_s + layers.rows_s(num_tokens))
        assert 0.6 < predicted_ms / milliseconds < 1.2, num_tokens


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_serves_its_context(name: str) -> None:
    profile = PROFILES[name]
    assert profile.kv_cache_tokens >= profile.max_model_len >= 4096
    times_s = [profile.costs.seconds(step_shape(chunk=n)) for n in (1, 16, 64, 256, 1024, 4096)]
    assert times_s == sorted(times_s)
    assert (profile.figures == "published") == ("100" in name)


def test_a_hybrid_reads_few_keys_and_a_state_a_stream() -> None:
    hybrid = rooflines()["qwen3.5-27b-h100-tp2"]
    dense = msgspec.structs.replace(
        hybrid,
        model=msgspec.structs.replace(
            hybrid.model, full_attention_interval=1, linear_num_value_heads=0
        ),
    )
    assert hybrid.costs.decode_context_s == pytest.approx(dense.costs.decode_context_s / 4)
    assert hybrid.costs.area_s == pytest.approx(dense.costs.area_s / 4)
    assert hybrid.kv_token_bytes == dense.kv_token_bytes / 4
    # 48 layers of 48 heads with 128 x 128 numbers of 4 bytes.
    assert hybrid.model.state_bytes == pytest.approx(151e6, rel=0.01)
    assert dense.model.state_bytes == dense.costs.decode_row_s == 0.0
    assert 0.02e-3 < hybrid.costs.decode_row_s == hybrid.costs.chunk_s < 0.2e-3


def test_more_gpus_are_faster_but_not_as_many_times() -> None:
    one = rooflines()["llama-3-8b-h100"]
    four = msgspec.structs.replace(one, tensor_parallel_size=4)
    for shape in (step_shape(num_decodes=8, context=2000), step_shape(chunk=4096)):
        ratio = one.costs.seconds(shape) / four.costs.seconds(shape)
        assert 1.0 < ratio < 4.0
    assert four.kv_cache_tokens > 4 * one.kv_cache_tokens
