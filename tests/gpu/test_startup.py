"""An engine's runtime on a GPU, from a checkpoint to its tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from legato.core.config import EngineConfig
from legato.core.errors import ConfigError, UnsupportedModelError
from legato.core.rows import GPU_ROWS, ExpertCounts, RowCounts
from legato.core.sampling_params import MAX_LOGPROBS
from legato.engine.build import blueprint, builder, gpu
from legato.engine.build.builder import build_engine
from legato.engine.loop.engine_loop import EngineLoop
from legato.engine.process.engine_messages import EngineInfo
from legato.gpu import device, runner
from legato.gpu.device import Memory
from legato.gpu.first_pass import check_first_pass
from legato.gpu.gpu_executor import GpuExecutor
from legato.gpu.memory import free_for_cache
from legato.gpu.runner import GraphRunner
from legato.gpu.step_inputs import StepSize
from legato.gpu.step_program import StepProgram
from tests.gpu.executors import device_here, make_executor, request
from tests.gpu.test_end_to_end import CONFIGS
from tests.model.conftest import SaveTiny, load, save_tiny

__all__ = ["save_tiny"]

MAX_LEN = 24
PROMPTS = {"a": [5, 20, 45, 80, 1, 2, 3, 4, 6], "b": [7]}
SETTINGS = {"max_num_seqs": 2, "max_num_batched_tokens": 6, "block_size": 4, "dtype": "float32"}


def engine_of(folder: Path, **settings: Any) -> tuple[EngineLoop, EngineInfo]:
    return build_engine(
        EngineConfig.of(model=str(folder), max_model_len=MAX_LEN, **{**SETTINGS, **settings})
    )


def tokens_of(engine: EngineLoop) -> dict[str, list[int]]:
    """Of a few requests."""
    tokens: dict[str, list[int]] = {name: [] for name in PROMPTS}
    events = [request(name, prompt, max_tokens=3) for name, prompt in PROMPTS.items()]
    outputs = engine.step(events)
    while outputs or engine.has_work:
        for output in outputs:
            tokens[output.request_id] += output.new_token_ids
        outputs = engine.step()
    return tokens


def program_of(engine: EngineLoop) -> StepProgram:
    executor = engine._executor
    assert isinstance(executor, GpuExecutor)
    return executor._program


def put_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or on what stands in for it, what is built from here on."""
    monkeypatch.setattr(blueprint, "resolve_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(device, "CudaDevice", lambda _: device_here())
    monkeypatch.setattr(gpu, "GPU_ROWS", RowCounts(((8, 8),), 24))


_CACHE = {"kv_cache_dtype": "int8", "kv_cache_memory_bytes": 2**20}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3", {}),
        ("glm4-moe, a layer without experts", {"quantization": "int8", **_CACHE}),
    ],
    ids=["measured", "experts and cache in 8 bits"],
)
def test_an_engine_is_put_together(
    name: str, settings: dict[str, Any], save_tiny: SaveTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the tokens of a CPU's engine."""
    folder, _ = save_tiny(CONFIGS[name])
    expected = tokens_of(engine_of(folder, device="cpu", **settings)[0])
    put_on_a_gpu(monkeypatch)
    engine, info = engine_of(folder, **settings)
    assert info.settings["kernels"] == "triton"
    assert info.settings["steps in flight"] == "2"
    assert info.scheduler.num_steps_in_flight == 2
    assert info.cache.num_blocks == 2 * MAX_LEN // 4
    assert program_of(engine).max_samples >= 2 + 64, "there is room for drafts"
    counts = engine._scheduler._step_time._rows.experts
    assert counts == (None if name == "qwen3" else ExpertCounts(6, 3, 1))
    assert tokens_of(engine) == expected


def test_a_cpus_kernels_are_refused(save_tiny: SaveTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_a_gpu(monkeypatch)
    with pytest.raises(ConfigError, match="a CPU's"):
        engine_of(save_tiny(CONFIGS["qwen3"])[0], kernels="avx2")


def test_without_triton_it_says_what_to_install(
    save_tiny: SaveTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_a_gpu(monkeypatch)
    monkeypatch.setattr(builder, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"legato-llm\[gpu\]"):
        engine_of(save_tiny(CONFIGS["qwen3"])[0])


def test_other_makers_gpus_are_refused(
    save_tiny: SaveTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_a_gpu(monkeypatch)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    with pytest.raises(ConfigError, match="--device cpu"):
        engine_of(save_tiny(CONFIGS["qwen3"])[0])


def test_without_a_compiler_it_says_what_to_install(
    save_tiny: SaveTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton needs one at the first launch."""
    put_on_a_gpu(monkeypatch)
    folder, _ = save_tiny(CONFIGS["qwen3"])
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ConfigError, match="C compiler for Triton: install gcc"):
        engine_of(folder)
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.raises(ConfigError, match="C compiler for Triton"):
        engine_of(folder)


def test_without_pythons_headers_it_says_what_to_install(
    save_tiny: SaveTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_a_gpu(monkeypatch)
    monkeypatch.setattr(builder.sysconfig, "get_config_var", lambda _: "/nowhere")
    with pytest.raises(ConfigError, match="python3-dev"):
        engine_of(save_tiny(CONFIGS["qwen3"])[0])


def test_a_layer_that_computes_no_numbers_is_named(save_tiny: SaveTiny) -> None:
    place = device_here()
    plain = load(save_tiny(CONFIGS["llama"])[0])
    _, program = make_executor(plain, block_size=4, num_blocks=2, device=place)
    check_first_pass(program, place, max_len=8)
    with torch.inference_mode():
        program.model.layers[1].mlp.down_proj.weight.fill_(3e38)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1 computes NaN"):
        check_first_pass(program, place, max_len=8)


class Sized:
    """A device of 10,000 bytes, and a program on it that takes some in passing."""

    states = None
    max_rows, max_samples = 384, 2
    largest = StepSize(384, 2, has_chunks=True)
    in_use, in_passing = 4000, {384: 1000, 256: 500}

    def __init__(self) -> None:
        self.words = torch.zeros(1)
        self.blocks = torch.zeros(250)
        self.torch_device = torch.device("cpu")
        self.peak = 0

    @property
    def memory(self) -> Memory:
        return Memory(free=10_000 - self.in_use, total=10_000, peak=self.peak)

    def forget_peak(self) -> None:
        self.peak = self.in_use

    def synchronize(self) -> None:
        pass

    def layers(self, size: StepSize) -> None:
        self.peak = max(self.peak, self.in_use + self.in_passing[size.num_rows])

    def head(self, size: StepSize) -> None:
        assert size.num_samples == 2

    def adjusted(self, num_samples: int, rows: list[object]) -> torch.Tensor:
        assert not rows
        return torch.zeros(num_samples, 3)

    def sample(self, size: StepSize, *, adjusted: torch.Tensor) -> None:
        assert len(adjusted) == size.num_samples == 2

    def scores(self, rows: torch.Tensor, num_top: int) -> None:
        assert (len(rows), num_top) == (2, MAX_LOGPROBS)


def test_the_cache_has_what_steps_and_graphs_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_MOST_ROWS", 256)
    sized: Any = Sized()
    graphs = GraphRunner(sized, sized, GPU_ROWS, max_decodes=2)
    # 9,000 may be used: 3,000 are taken without the program's own cache, and steps take 1,500.
    assert free_for_cache(sized, graphs, sized, 0.9) == 4500
    assert free_for_cache(sized, graphs, sized, 0.4) == 0
