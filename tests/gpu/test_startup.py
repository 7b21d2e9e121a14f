"""An engine's machinery on a GPU, from a checkpoint to its tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from legato.core.config import EngineConfig
from legato.core.errors import ConfigError, UnsupportedModelError
from legato.core.rows import GPU_ROWS, RowCounts
from legato.engine.loop.engine_loop import EngineLoop
from legato.engine.loop.grammars import Grammars
from legato.engine.startup import gpu
from legato.engine.startup.gpu import gpu_machinery
from legato.engine.startup.machinery import Machinery, Wanted
from legato.engine.startup.parts import StartParts
from legato.gpu import runner
from legato.gpu.device import Device, Memory
from legato.gpu.first_pass import check_first_pass
from legato.gpu.runner import GraphRunner
from legato.gpu.step_inputs import StepSize
from legato.gpu.warm_up import free_for_cache
from legato.model.loader import open_checkpoint
from legato.scheduler.scheduler import Scheduler
from tests.gpu.executors import device_here, make_executor, request
from tests.gpu.test_end_to_end import CONFIGS, greedy
from tests.model.conftest import SaveTiny, load, save_tiny

__all__ = ["save_tiny"]

MAX_LEN = 24
SETTINGS = {"max_num_seqs": 2, "max_num_batched_tokens": 6, "block_size": 4, "dtype": "float32"}


def machinery(folder: Path, device: Device, **settings: Any) -> Machinery:
    config = EngineConfig.of(model=str(folder), max_model_len=MAX_LEN, **{**SETTINGS, **settings})
    checkpoint = open_checkpoint(config.model)
    scheduler = config.scheduler.resolve(MAX_LEN, "cuda")
    wanted = Wanted(
        EngineConfig(model=config.model, cache=config.cache, scheduler=scheduler),
        checkpoint,
        torch.float32,
        device.torch_device,
        MAX_LEN,
        Grammars().__getitem__,
        StartParts(),
    )
    return gpu_machinery(wanted, device)


def test_an_engine_is_put_together(save_tiny: SaveTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "GPU_ROWS", RowCounts(((2, 2),), 8))
    folder, model = save_tiny(CONFIGS["qwen3"])
    made = machinery(folder, device_here())
    assert made.executor.depth == 2
    assert made.kv.num_blocks == 2 * MAX_LEN // 4
    config = EngineConfig.of(**SETTINGS).scheduler.resolve(MAX_LEN, "cuda")
    scheduler = Scheduler(config, max_model_len=MAX_LEN, kv=made.kv)
    engine = EngineLoop(scheduler, made.kv, made.executor)
    prompts = {"a": [5, 20, 45, 80, 1, 2, 3, 4, 6], "b": [7]}
    events = [request(name, prompt, max_tokens=4) for name, prompt in prompts.items()]
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    for output in engine.step(events):
        tokens[output.request_id] += output.new_token_ids
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
    assert tokens == {name: greedy(model, prompt, 4) for name, prompt in prompts.items()}


def test_what_is_a_cpus_is_refused(save_tiny: SaveTiny) -> None:
    with pytest.raises(ConfigError, match="a CPU's"):
        machinery(save_tiny(CONFIGS["qwen3"])[0], device_here(), kernels="avx2")


def test_a_layer_that_computes_no_numbers_is_named(save_tiny: SaveTiny) -> None:
    device = device_here()
    plain = load(save_tiny(CONFIGS["llama"])[0])
    _, program = make_executor(plain, block_size=4, num_blocks=2, device=device)
    check_first_pass(program, device, max_len=8)
    with torch.inference_mode():
        program.model.layers[1].mlp.down_proj.weight.fill_(3e38)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1 computes NaN"):
        check_first_pass(program, device, max_len=8)


class Sized:
    """A device of 10,000 bytes, and a program on it that takes some in passing."""

    max_rows, max_samples = 384, 2
    in_use, in_passing = 4000, {384: 1000, 256: 500}

    def __init__(self) -> None:
        self.words = torch.zeros(1)
        self.blocks = torch.zeros(250)
        self.logits = torch.zeros(2, 3)
        self.peak = 0

    @property
    def memory(self) -> Memory:
        return Memory(free=10_000 - self.in_use, total=10_000, peak=self.peak)

    def forget_peak(self) -> None:
        self.peak = self.in_use

    def synchronize(self) -> None:
        pass

    def forward(self, size: StepSize) -> None:
        self.peak = max(self.peak, self.in_use + self.in_passing[size.num_rows])

    def sample(self, size: StepSize, *, adjusted: torch.Tensor) -> None:
        assert len(adjusted) == size.num_samples == 2


def test_the_cache_has_what_steps_and_graphs_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_MOST_ROWS", 256)
    sized: Any = Sized()
    graphs = GraphRunner(sized, sized, GPU_ROWS, max_decodes=2)
    # 9,000 may be used, of which 3,000 are without the program's own cache, and steps take 1,500.
    assert free_for_cache(sized, graphs, sized, 0.9) == 4500
    assert free_for_cache(sized, graphs, sized, 0.4) == 0
