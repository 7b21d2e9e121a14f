"""Builds the runtime of a model on a GPU; imported only if there is a GPU."""

from collections.abc import Callable, Sequence

import msgspec
import torch

from legato.checkpoint.loader import fill_model
from legato.core.errors import ConfigError
from legato.core.memory_limits import check_size
from legato.core.plan import FIRST_STATE
from legato.core.rows import GPU_ROWS
from legato.engine.build.blueprint import Blueprint
from legato.engine.build.kv_cache import configured_cache, make_kv_manager, no_memory
from legato.engine.build.runtime import ModelRuntime
from legato.executor.cache_memory import raising_memory_error
from legato.executor.state_cache import StateCache
from legato.gpu.decoder import GpuDecoder
from legato.gpu.device import Device
from legato.gpu.first_pass import check_first_pass
from legato.gpu.gpu_executor import GpuExecutor
from legato.gpu.host_cache import num_staged_blocks
from legato.gpu.memory import free_for_cache
from legato.gpu.runner import GraphRunner
from legato.gpu.step_program import StepProgram
from legato.gpu.warm_up import warm_up
from legato.kv.manager import KVCacheManager
from legato.model.communicator import ALONE, Communicator
from legato.model.model import CacheGroup, CacheSpec

_DEFAULT_UTILIZATION = 0.9


def gpu_runtime(blueprint: Blueprint, device: Device) -> ModelRuntime:
    """Load the model, size its cache by the memory that steps leave, and record graphs of steps.

    Raises:
        ConfigError, UnsupportedModelError: like `build_engine`.
    """
    shard = GpuShard(blueprint, device)
    cache = configured_cache(blueprint, shard.model.cache)
    groups = cache.groups(blueprint.max_model_len)
    kv = make_kv_manager(blueprint, groups, shard.cache_bytes())
    shard.make_cache(kv.group_sizes, kv.num_states)
    return shard.runtime(cache, kv)


class GpuShard:
    """One GPU's shard of a model: its weights, then its cache and its graphs of steps.

    Args:
        communicator: connects the GPUs that have the other shards. It is first used in
            `cache_bytes`. All GPUs call that and `make_cache` at the same time.

    Attributes:
        program, runner: compute its steps; set by `make_cache`.
    """

    program: StepProgram
    runner: GraphRunner

    def __init__(
        self, blueprint: Blueprint, device: Device, communicator: Communicator = ALONE
    ) -> None:
        """Load the weights; raises like `build_engine`."""
        config = blueprint.config
        if config.model.kernels != "auto":
            raise ConfigError(f"the {config.model.kernels} kernels are a CPU's")
        blueprint.timer.end("description")
        self._blueprint = blueprint
        self._device = device
        self._num_ranks = communicator.size
        self.model = fill_model(
            lambda: GpuDecoder(
                blueprint.checkpoint.decoder_spec,
                dtype=blueprint.dtype,
                device=device.torch_device,
                communicator=communicator,
                is_fp8=config.model.quantization == "fp8",
            ),
            blueprint.checkpoint,
            dtype=blueprint.dtype,
            device=device.torch_device,
            quantization=config.model.quantization,
            communicator=communicator,
        )
        blueprint.timer.end("weights")

    @property
    def depth(self) -> int:
        """Most steps in flight."""
        depth = self._blueprint.config.scheduler.num_steps_in_flight
        assert depth is not None
        return depth

    def cache_bytes(self) -> int:
        """Return the memory for the cache of all GPUs, as if all had as much free as this one.

        Steps with a cache of one block measure it.

        Raises:
            ConfigError: there is not enough memory for steps.
        """
        blueprint, config = self._blueprint, self._blueprint.config.cache
        if config.kv_cache_memory_bytes is not None:
            most_bytes = self._num_ranks * self._device.memory.total
            owner = "this GPU" if self._num_ranks == 1 else f"all {self._num_ranks} GPUs together"
            check_size("--kv-cache-memory", config.kv_cache_memory_bytes, most_bytes, owner)
            return config.kv_cache_memory_bytes
        utilization = config.gpu_memory_utilization or _DEFAULT_UTILIZATION
        try:
            with raising_memory_error():
                program = self._make_program([1] * len(self._groups), FIRST_STATE)
                runner = self._make_runner(program)
                own = free_for_cache(program, runner, self._device, utilization)
        except MemoryError as error:
            raise ConfigError(
                f"there is no memory for steps of {blueprint.max_rows:,} tokens beside the "
                "weights: lower --max-num-batched-tokens"
            ) from error
        if config.swap_space_bytes:
            sizes = [blueprint.block_size * group.cache.token_bytes for group in self._groups]
            own = max(0, own - sum(num_staged_blocks(size) * size for size in sizes))
        return self._num_ranks * own

    def make_cache(self, num_blocks: Sequence[int], num_states: int) -> None:
        """Make the cache, and record graphs of steps.

        Args:
            num_blocks: of each cache group.
            num_states: slots of recurrent layers' states; 0 without such layers.

        Raises:
            ConfigError: there is not enough memory for them.
            UnsupportedModelError: the model computes no numbers.
        """
        blueprint, device, timer = self._blueprint, self._device, self._blueprint.timer
        try:
            self.program = self._make_program(num_blocks, num_states)
        except MemoryError as error:
            cache_bytes = num_states * blueprint.state_bytes
            for group, count in zip(self._groups, num_blocks, strict=True):
                cache_bytes += count * blueprint.block_size * group.cache.token_bytes
            raise no_memory(cache_bytes) from error
        timer.end("cache")
        check_first_pass(self.program, device, max_len=blueprint.max_model_len)
        timer.end("first pass")
        self.runner = self._make_runner(self.program)
        try:
            with raising_memory_error():
                warm_up(self.program, self.runner, device)
        except MemoryError as error:
            raise ConfigError(
                "there is no memory for graphs beside the KV cache: lower "
                "--gpu-memory-utilization, or --kv-cache-memory"
            ) from error
        timer.end("graphs")

    def runtime(
        self,
        cache: CacheSpec,
        kv: KVCacheManager,
        executor: Callable[..., GpuExecutor] = GpuExecutor,
    ) -> ModelRuntime:
        """Return the model's runtime; called on the only shard, or on rank 0's.

        Args:
            cache: the whole model's.
            executor: makes the executor of all ranks.
        """
        blueprint = self._blueprint
        return ModelRuntime(
            blueprint=blueprint,
            model=self.model,
            cache=cache,
            groups=cache.groups(blueprint.max_model_len),
            kv=kv,
            executor=executor(
                self.program,
                self._device,
                self.runner,
                depth=self.depth,
                host_sizes=kv.host_sizes,
                grammar=blueprint.grammar,
                score_head=blueprint.score_head,
            ),
            blocks=tuple(self.program.blocks),
            rows=msgspec.structs.replace(
                GPU_ROWS, experts=self.model.spec.expert_counts, most_packed=self.model.most_packed
            ),
            kernels="triton",
        )

    @property
    def _groups(self) -> tuple[CacheGroup, ...]:
        """Of this shard's part of the cache."""
        cache = configured_cache(self._blueprint, self.model.cache)
        return cache.groups(self._blueprint.max_model_len)

    def _make_runner(self, program: StepProgram) -> GraphRunner:
        return GraphRunner(program, self._device, GPU_ROWS, max_decodes=self._blueprint.max_samples)

    def _make_program(self, num_blocks: Sequence[int], num_states: int) -> StepProgram:
        """Raises `MemoryError`."""
        blueprint, block_size, groups = self._blueprint, self._blueprint.block_size, self._groups
        states: StateCache | None = None
        with raising_memory_error():
            if shapes := self.model.spec.states:
                states = StateCache(
                    shapes,
                    num_slots=num_states,
                    dtype=blueprint.dtype,
                    device=self._device.torch_device,
                )
            return StepProgram(
                self.model,
                groups,
                [
                    _blocks(group.cache, count, block_size, self._device)
                    for group, count in zip(groups, num_blocks, strict=True)
                ],
                self._device,
                block_size=block_size,
                num_slots=2 * blueprint.max_num_seqs,
                max_blocks=blueprint.blocks_per_request,
                max_rows=GPU_ROWS.padded(blueprint.max_rows),
                max_samples=GPU_ROWS.padded(blueprint.max_samples),
                states=states,
            )


def _blocks(cache: CacheSpec, num_blocks: int, block_size: int, device: Device) -> torch.Tensor:
    """Make blocks filled with zeros: calibration reads unwritten blocks."""
    return torch.zeros(
        (cache.num_layers, 2, num_blocks, block_size * cache.layer_numbers),
        dtype=cache.kept_dtype,
        device=device.torch_device,
    )
