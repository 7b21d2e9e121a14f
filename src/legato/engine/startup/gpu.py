"""The machinery on a GPU, which is imported only where there is one."""

import torch

from legato.core.config import EngineConfig
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
from legato.model.loader import fill_model

_DEFAULT_UTILIZATION = 0.9


def gpu_machinery(wanted: Wanted, device: Device) -> Machinery:
    """Load the model, size its cache by what steps leave of the memory, and have graphs of steps.

    Raises:
        ConfigError, UnsupportedModelError: as `build_engine`.
    """
    config, start = wanted.config, wanted.start
    _check(config)
    start.end("description")
    model = fill_model(
        lambda: GpuDecoder(
            wanted.checkpoint.spec,
            dtype=wanted.dtype,
            device=device.torch_device,
            is_fp8=config.model.quantization == "fp8",
        ),
        wanted.checkpoint,
        dtype=wanted.dtype,
        device=device.torch_device,
        quantization=config.model.quantization,
    )
    start.end("weights")
    cache = wanted_cache(wanted, model.cache)
    kv = make_kv(wanted, cache, _cache_bytes(wanted, model, cache, device))
    try:
        program = _program(wanted, model, cache, device, kv.num_blocks)
    except MemoryError as error:
        raise no_memory(kv, cache) from error
    start.end("cache")
    check_first_pass(program, device, max_len=wanted.max_model_len)
    start.end("first pass")
    runner = GraphRunner(program, device, GPU_ROWS, max_decodes=wanted.max_num_seqs)
    try:
        with raising_memory_error():
            warm_up(program, runner, device)
    except MemoryError as error:
        raise ConfigError(
            "there is no memory for graphs beside the KV cache: lower --gpu-memory-utilization, or "
            "--kv-cache-memory"
        ) from error
    start.end("graphs")
    depth = config.scheduler.num_steps_in_flight
    assert depth is not None
    executor = GpuExecutor(
        program,
        device,
        runner,
        depth=depth,
        num_host_slots=kv.num_host_slots,
        grammar=wanted.grammar,
    )
    return Machinery(model, cache, kv, executor, program.blocks, GPU_ROWS, "triton")


def _check(config: EngineConfig) -> None:
    if config.model.kernels != "auto":
        raise ConfigError(f"the {config.model.kernels} kernels are a CPU's")


def _cache_bytes(wanted: Wanted, model: GpuDecoder, cache: CacheSpec, device: Device) -> int:
    """What the cache may take, found out by steps that have a cache of one block."""
    config = wanted.config.cache
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    utilization = config.gpu_memory_utilization or _DEFAULT_UTILIZATION
    try:
        with raising_memory_error():
            program = _program(wanted, model, cache, device, num_blocks=1)
            runner = GraphRunner(program, device, GPU_ROWS, max_decodes=wanted.max_num_seqs)
            return free_for_cache(program, runner, device, utilization)
    except MemoryError as error:
        raise ConfigError(
            f"there is no memory for steps of {wanted.max_rows:,} tokens beside the weights: lower "
            "--max-num-batched-tokens"
        ) from error


def _program(
    wanted: Wanted, model: GpuDecoder, cache: CacheSpec, device: Device, num_blocks: int
) -> StepProgram:
    """Raises `MemoryError`."""
    block_size = wanted.config.cache.block_size
    with raising_memory_error():
        return StepProgram(
            model,
            _blocks(cache, num_blocks, block_size, device),
            device,
            block_size=block_size,
            num_slots=2 * wanted.max_num_seqs,
            max_blocks=wanted.blocks_per_request,
            max_rows=GPU_ROWS.padded(wanted.max_rows),
            max_samples=GPU_ROWS.padded(wanted.max_num_seqs),
        )


def _blocks(cache: CacheSpec, num_blocks: int, block_size: int, device: Device) -> torch.Tensor:
    """Of numbers that harm nobody: what nobody wrote is read when steps are measured."""
    return torch.zeros(
        (cache.num_layers, 2, num_blocks, block_size * cache.layer_numbers),
        dtype=cache.kept_dtype,
        device=device.torch_device,
    )
