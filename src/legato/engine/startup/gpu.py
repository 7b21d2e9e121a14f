"""The machinery on a GPU, which is imported only where there is one."""

import torch

from legato.checkpoint.loader import fill_model
from legato.core.errors import ConfigError
from legato.core.rows import GPU_ROWS
from legato.engine.startup.machinery import Machinery, Wanted, make_kv, no_memory, wanted_cache
from legato.executor.memory import raising_memory_error
from legato.gpu.decoder import GpuDecoder
from legato.gpu.device import Device
from legato.gpu.executor import GpuExecutor
from legato.gpu.first_pass import check_first_pass
from legato.gpu.memory import free_for_cache
from legato.gpu.runner import GraphRunner
from legato.gpu.step_program import StepProgram
from legato.gpu.warm_up import warm_up
from legato.model.base import CacheSpec
from legato.model.communicator import ALONE, Communicator

_DEFAULT_UTILIZATION = 0.9


def gpu_machinery(wanted: Wanted, device: Device) -> Machinery:
    """Load the model, size its cache by what steps leave of the memory, and have graphs of steps.

    Raises:
        ConfigError, UnsupportedModelError: as `build_engine`.
    """
    part = GpuPart(wanted, device)
    cache = wanted_cache(wanted, part.model.cache)
    kv = make_kv(wanted, cache, part.cache_bytes())
    part.make_cache(kv.num_blocks)
    executor = GpuExecutor(
        part.program,
        device,
        part.runner,
        depth=part.depth,
        num_host_slots=kv.num_host_slots,
        grammar=wanted.grammar,
    )
    return Machinery(part.model, cache, kv, executor, part.program.blocks, GPU_ROWS, "triton")


class GpuPart:
    """What one GPU has of a model, its cache and its steps: loaded, and given a cache, in turn.

    Args:
        communicator: to the GPUs that have the other parts. Nothing is told them before
            `cache_bytes`; all of them call this and the next, and then at the same time.

    Attributes:
        program, runner: of its steps; made with the cache.
    """

    program: StepProgram
    runner: GraphRunner

    def __init__(self, wanted: Wanted, device: Device, communicator: Communicator = ALONE) -> None:
        """Raises as `build_engine`."""
        config = wanted.config
        if config.model.kernels != "auto":
            raise ConfigError(f"the {config.model.kernels} kernels are a CPU's")
        wanted.start.end("description")
        self._wanted = wanted
        self._device = device
        self._num_ranks = communicator.size
        self.model = fill_model(
            lambda: GpuDecoder(
                wanted.checkpoint.spec,
                dtype=wanted.dtype,
                device=device.torch_device,
                communicator=communicator,
                is_fp8=config.model.quantization == "fp8",
            ),
            wanted.checkpoint,
            dtype=wanted.dtype,
            device=device.torch_device,
            quantization=config.model.quantization,
            communicator=communicator,
        )
        wanted.start.end("weights")

    @property
    def depth(self) -> int:
        """Most steps in flight."""
        depth = self._wanted.config.scheduler.num_steps_in_flight
        assert depth is not None
        return depth

    def cache_bytes(self) -> int:
        """What the cache may take of all GPUs together, were there room on all as there is here.

        It is found out by steps that have a cache of one block.

        Raises:
            ConfigError: there is no memory for steps.
        """
        wanted, config = self._wanted, self._wanted.config.cache
        if config.kv_cache_memory_bytes is not None:
            return config.kv_cache_memory_bytes
        utilization = config.gpu_memory_utilization or _DEFAULT_UTILIZATION
        try:
            with raising_memory_error():
                program = self._make_program(num_blocks=1)
                runner = self._make_runner(program)
                own = free_for_cache(program, runner, self._device, utilization)
        except MemoryError as error:
            raise ConfigError(
                f"there is no memory for steps of {wanted.max_rows:,} tokens beside the weights: "
                "lower --max-num-batched-tokens"
            ) from error
        return self._num_ranks * own

    def make_cache(self, num_blocks: int) -> None:
        """Have a cache, and graphs of steps.

        Raises:
            ConfigError: there is no memory for them.
            UnsupportedModelError: the model computes no numbers.
        """
        wanted, device, start = self._wanted, self._device, self._wanted.start
        try:
            self.program = self._make_program(num_blocks)
        except MemoryError as error:
            block_bytes = wanted.config.cache.block_size * self._cache.token_bytes
            raise no_memory(num_blocks * block_bytes) from error
        start.end("cache")
        check_first_pass(self.program, device, max_len=wanted.max_model_len)
        start.end("first pass")
        self.runner = self._make_runner(self.program)
        try:
            with raising_memory_error():
                warm_up(self.program, self.runner, device)
        except MemoryError as error:
            raise ConfigError(
                "there is no memory for graphs beside the KV cache: lower "
                "--gpu-memory-utilization, or --kv-cache-memory"
            ) from error
        start.end("graphs")

    @property
    def _cache(self) -> CacheSpec:
        """Of this part."""
        return wanted_cache(self._wanted, self.model.cache)

    def _make_runner(self, program: StepProgram) -> GraphRunner:
        return GraphRunner(program, self._device, GPU_ROWS, max_decodes=self._wanted.max_samples)

    def _make_program(self, num_blocks: int) -> StepProgram:
        """Raises `MemoryError`."""
        wanted, block_size = self._wanted, self._wanted.config.cache.block_size
        with raising_memory_error():
            return StepProgram(
                self.model,
                _blocks(self._cache, num_blocks, block_size, self._device),
                self._device,
                block_size=block_size,
                num_slots=2 * wanted.max_num_seqs,
                max_blocks=wanted.blocks_per_request,
                max_rows=GPU_ROWS.padded(wanted.max_rows),
                max_samples=GPU_ROWS.padded(wanted.max_samples),
            )


def _blocks(cache: CacheSpec, num_blocks: int, block_size: int, device: Device) -> torch.Tensor:
    """Of numbers that harm nobody: what nobody wrote is read when steps are measured."""
    return torch.zeros(
        (cache.num_layers, 2, num_blocks, block_size * cache.layer_numbers),
        dtype=cache.kept_dtype,
        device=device.torch_device,
    )
