"""Puts an engine together from its configuration, resolving every "auto" to a number."""

import logging
from dataclasses import dataclass, replace

import msgspec
import torch

from legato.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.memory import advice
from legato.core.rows import CPU_ROWS, RowCounts
from legato.core.stats import CacheInfo
from legato.engine.loop.engine_loop import EngineLoop
from legato.engine.loop.grammars import Grammars
from legato.engine.process.messages import EngineInfo
from legato.engine.startup.parts import StartParts
from legato.engine.startup.step_times import known_steps, recalibration
from legato.executor.attention.base import AttentionBackend
from legato.executor.attention.native_backend import BLOCK_MULTIPLE, NativeAttentionBackend
from legato.executor.attention.torch_backend import TorchAttentionBackend
from legato.executor.first_pass import check_forward
from legato.executor.memory import (
    num_cache_blocks,
    num_swap_blocks,
    raising_memory_error,
    take_memory,
)
from legato.executor.torch_executor import TorchExecutor
from legato.executor.untaken_pages import UntakenPages
from legato.kv.manager import KVCacheManager
from legato.model.base import SCALE_BYTES, CacheSpec, Model
from legato.model.loader import load_model, open_checkpoint, resolve_dtype
from legato.model.native import (
    NativeKernels,
    NativeModel,
    native_instructions,
    unbuilt_instructions,
    why_not_native,
)
from legato.model.packed_linear import PackedDecoder
from legato.model.spec import DecoderSpec
from legato.scheduler.scheduler import Scheduler
from legato.scheduler.step_time import StepTimeModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineParts:
    """A loaded model with its cache, before anything is scheduled on it.

    Attributes:
        config: resolved.
        cache: what the cache keeps of each token.
        rows: what batches are padded to.
        kernels: the native ones' set of instructions, or "torch".
        untaken: what of the cache's memory may be taken while there is nothing to do.
        grammars: where the executor finds those of requests.
    """

    config: EngineConfig
    spec: DecoderSpec
    model: Model
    cache: CacheSpec
    kv: KVCacheManager
    executor: TorchExecutor
    max_model_len: int
    rows: RowCounts
    kernels: str
    untaken: UntakenPages | None
    grammars: Grammars


def build_engine(config: EngineConfig) -> tuple[EngineLoop, EngineInfo]:
    """Load the model, size the cache, and tie them to a scheduler.

    Returns:
        The engine, and what a front end needs to know of it.

    Raises:
        ConfigError: settings that contradict each other, the model or the machine.
        UnsupportedModelError: a checkpoint that cannot be run.
    """
    start = StartParts()
    parts = load_parts(config, start)
    known = known_steps(parts)
    step_time = StepTimeModel(known.steps, parts.rows)
    scheduler = Scheduler(
        parts.config.scheduler,
        max_model_len=parts.max_model_len,
        kv=parts.kv,
        step_time=step_time,
    )
    start.end("calibration")
    info = msgspec.structs.replace(_describe(parts), start_s=start.seconds)
    for name, value in info.settings.items():
        logger.debug("%s: %s", name, value)
    engine = EngineLoop(scheduler, parts.kv, parts.executor, grammars=parts.grammars)
    engine.untaken = parts.untaken
    if known.is_doubtful:
        engine.recalibration = recalibration(parts, step_time)
    return engine, info


def model_context(config: ModelConfig) -> int:
    """Longest prompt plus output in tokens, without loading the model.

    Raises:
        ConfigError: there is no such model, or it cannot have what is configured.
        UnsupportedModelError: a checkpoint that cannot be run.
    """
    return _max_model_len(config.max_model_len, open_checkpoint(config).spec)


def load_parts(config: EngineConfig, start: StartParts | None = None) -> EngineParts:
    """Load the model and make its cache; raises as `build_engine`.

    Args:
        start: is told of each part of it.
    """
    start = start or StartParts()
    checkpoint = open_checkpoint(config.model)
    max_model_len = _max_model_len(config.model.max_model_len, checkpoint.spec)
    device = resolve_device(config.model.device)
    scheduler_config = config.scheduler.resolve(max_model_len, device.type)
    assert scheduler_config.max_num_seqs is not None
    if config.model.num_threads is not None:
        torch.set_num_threads(config.model.num_threads)
    dtype = resolve_dtype(config.model, checkpoint)
    kernels = _native_kernels(config, checkpoint.spec, dtype, device)
    start.end("description")
    model = load_model(
        checkpoint,
        dtype=dtype,
        device=device,
        kernels=kernels,
        quantization=config.model.quantization,
    )
    _compile_kernels(model, scheduler_config)
    start.end("weights")
    cache = replace(model.cache, is_quantized=config.cache.kv_cache_dtype == "int8")
    _check_scales(cache, config.cache.block_size)
    bytes_per_block = config.cache.block_size * cache.token_bytes
    num_blocks = num_cache_blocks(
        config.cache,
        bytes_per_block=bytes_per_block,
        blocks_per_request=-(-max_model_len // config.cache.block_size),
        max_num_seqs=scheduler_config.max_num_seqs,
        device=device,
    )
    num_host_slots = num_swap_blocks(config.cache, bytes_per_block=bytes_per_block, device=device)
    resolved = msgspec.structs.replace(config, scheduler=scheduler_config)
    kv = KVCacheManager(
        num_blocks,
        config.cache.block_size,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        num_host_slots=num_host_slots,
    )
    attention = _attention(model, cache, kv)
    if config.cache.kv_cache_memory_bytes is not None and device.type == "cpu":
        logger.info("taking %.2f GiB for the KV cache", num_blocks * bytes_per_block / 2**30)
        take_memory(attention.blocks)
    start.end("cache")
    check_forward(
        model,
        attention,
        block_size=kv.block_size,
        vocab_size=checkpoint.spec.vocab_size,
        max_len=max_model_len,
    )
    start.end("first pass")
    grammars = Grammars(scheduler_config.max_waiting)
    return EngineParts(
        resolved,
        checkpoint.spec,
        model,
        cache,
        kv,
        TorchExecutor(
            model,
            attention,
            kv.block_size,
            num_host_slots=num_host_slots,
            grammar=grammars.__getitem__,
        ),
        max_model_len,
        CPU_ROWS,
        "torch" if kernels is None else kernels.instructions,
        _untaken(config.cache, attention),
        grammars,
    )


def _untaken(config: CacheConfig, attention: AttentionBackend) -> UntakenPages | None:
    is_sized, is_on_cpu = config.kv_cache_memory_bytes is not None, attention.blocks.is_cpu
    if is_sized or not is_on_cpu or not config.take_memory_when_idle:
        return None
    return UntakenPages(attention.blocks)


def _check_scales(cache: CacheSpec, block_size: int) -> None:
    """The scales behind the numbers of a block have to lie at multiples of their size."""
    if cache.is_quantized and block_size * cache.head_dim % SCALE_BYTES:
        raise ConfigError(
            f"with --kv-cache-dtype int8, --block-size times the head size, {cache.head_dim}, must "
            f"be a multiple of {SCALE_BYTES}"
        )


def _native_kernels(
    config: EngineConfig, spec: DecoderSpec, dtype: torch.dtype, device: torch.device
) -> NativeKernels | None:
    """What native layers run on; None where PyTorch's kernels are asked for, or have to do."""
    wanted = config.model.kernels
    if wanted == "torch":
        return None
    reason = why_not_native(spec, dtype, device)
    if not reason and config.cache.block_size % BLOCK_MULTIPLE:
        reason = f"the block size {config.cache.block_size} is not a multiple of {BLOCK_MULTIPLE}"
    known = native_instructions()
    if not reason and wanted not in ("auto", *known):
        reason = f"only {', '.join(known)} can"
    if not reason:
        if wanted == "auto" and (unbuilt := unbuilt_instructions()):
            names = ", ".join(unbuilt)
            logger.warning("no %s kernels were built: the compiler did not know how", names)
        return NativeKernels(torch.get_num_threads(), known[0] if wanted == "auto" else wanted)
    if wanted != "auto":
        raise ConfigError(f"the {wanted} kernels cannot run here: {reason}")
    if device.type == "cpu":
        logger.info("PyTorch computes the layers, more slowly than native kernels: %s", reason)
    return None


def _attention(model: Model, cache: CacheSpec, kv: KVCacheManager) -> AttentionBackend:
    sizes = {"num_blocks": kv.num_blocks, "block_size": kv.block_size}
    try:
        with raising_memory_error():
            if isinstance(model, NativeModel):
                return NativeAttentionBackend(model, cache, **sizes)
            return TorchAttentionBackend(cache, **sizes, device=model.device)
    except MemoryError as error:
        num_bytes = kv.num_blocks * kv.block_size * cache.token_bytes
        raise ConfigError(
            f"there is no memory for a KV cache of {num_bytes:,} bytes: {advice()}"
        ) from error


def _compile_kernels(model: Model, config: SchedulerConfig) -> None:
    if not isinstance(model, PackedDecoder):
        return
    assert config.max_num_batched_tokens is not None
    assert config.max_num_seqs is not None
    most = config.max_num_batched_tokens + config.max_num_seqs
    model.compile_kernels(
        num_rows=CPU_ROWS.up_to(most), num_samples=CPU_ROWS.up_to(config.max_num_seqs)
    )


def _max_model_len(wanted: int | None, spec: DecoderSpec) -> int:
    if wanted is None:
        return spec.max_model_len
    if not 1 < wanted <= spec.max_model_len:
        raise ConfigError(
            f"max_model_len must be in [2, {spec.max_model_len}] for this model, got {wanted}"
        )
    return wanted


def resolve_device(wanted: str) -> torch.device:
    """What "auto" stands for here; raises `ConfigError` where there is no such device."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for, but torch sees no CUDA device")
    return torch.device(wanted)


def _describe(parts: EngineParts) -> EngineInfo:
    config, model, kv = parts.config, parts.model, parts.kv
    num_cache_tokens = kv.num_blocks * kv.block_size
    cache_bytes = num_cache_tokens * parts.cache.token_bytes
    return EngineInfo(
        model=config.model.model,
        served_model_names=(config.model.model,),
        max_model_len=parts.max_model_len,
        device=parts.model.device.type,
        vocab_size=parts.spec.vocab_size,
        cache=CacheInfo(
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
            dtype=_name(parts.cache.kept_dtype),
            enable_prefix_caching=config.cache.enable_prefix_caching,
        ),
        slo_classes=config.scheduler.classes,
        settings={
            "model": config.model.model,
            "dtype": _name(model.dtype),
            "device": str(model.device),
            "threads": str(torch.get_num_threads()),
            "weights": config.model.quantization or "not quantized",
            "kernels": parts.kernels,
            "max model length": f"{parts.max_model_len:,} tokens",
            "KV cache": f"{kv.num_blocks:,} blocks, {num_cache_tokens:,} tokens, "
            f"{cache_bytes / 2**30:.2f} GiB, {_name(parts.cache.kept_dtype)}",
            "prefix caching": "on" if config.cache.enable_prefix_caching else "off",
            "policy": config.scheduler.policy,
            "chunked prefill": "on" if config.scheduler.enable_chunked_prefill else "off",
            "step budget": _step_budget(config.scheduler),
            "prefill order": f"{config.scheduler.prefill_order}",
            **{f"class {name}": str(slo) for name, slo in config.scheduler.classes.items()},
            "max running": f"{config.scheduler.max_num_seqs}",
            "steps in flight": f"{config.scheduler.num_steps_in_flight}",
        },
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _step_budget(config: SchedulerConfig) -> str:
    tokens = f"{config.max_num_batched_tokens:,} tokens"
    return f"what the SLOs allow, up to {tokens}" if config.promises_pace else tokens
