"""The machinery on a CPU: native layers where they can run, PyTorch's elsewhere."""

import logging

import torch

from legato.core.config import CacheConfig, EngineConfig
from legato.core.errors import ConfigError
from legato.core.rows import CPU_ROWS
from legato.engine.startup.machinery import (
    Machinery,
    Wanted,
    make_kv,
    no_memory,
    wanted_cache,
)
from legato.executor.attention.base import AttentionBackend
from legato.executor.attention.native_backend import BLOCK_MULTIPLE, NativeAttentionBackend
from legato.executor.attention.torch_backend import TorchAttentionBackend
from legato.executor.first_pass import check_forward
from legato.executor.memory import host_cache_bytes, raising_memory_error, take_memory
from legato.executor.torch_executor import TorchExecutor
from legato.executor.untaken_pages import UntakenPages
from legato.kv.manager import KVCacheManager
from legato.model.base import CacheSpec, Model
from legato.model.loader import load_model
from legato.model.native import (
    NativeKernels,
    NativeModel,
    native_instructions,
    unbuilt_instructions,
    why_not_native,
)
from legato.model.packed_linear import PackedDecoder
from legato.model.spec import DecoderSpec

logger = logging.getLogger(__name__)


def host_machinery(wanted: Wanted) -> Machinery:
    """Load the model and make its cache; raises as `build_engine`."""
    config, start, spec = wanted.config, wanted.start, wanted.checkpoint.spec
    if config.scheduler.num_steps_in_flight != 1:
        raise ConfigError(
            "two steps in flight are for a GPU: on a CPU both would want the same cores"
        )
    kernels = _native_kernels(config, spec, wanted.dtype, wanted.device)
    start.end("description")
    model = load_model(
        wanted.checkpoint,
        dtype=wanted.dtype,
        device=wanted.device,
        kernels=kernels,
        quantization=config.model.quantization,
    )
    if isinstance(model, PackedDecoder):
        model.compile_kernels(
            num_rows=CPU_ROWS.up_to(wanted.max_rows),
            num_samples=CPU_ROWS.up_to(wanted.max_num_seqs),
        )
    start.end("weights")
    cache = wanted_cache(wanted, model.cache)
    kv = make_kv(wanted, cache, host_cache_bytes(config.cache))
    attention = _attention(model, cache, kv)
    if config.cache.kv_cache_memory_bytes is not None:
        num_bytes = kv.num_blocks * kv.block_size * cache.token_bytes
        logger.info("taking %.2f GiB for the KV cache", num_bytes / 2**30)
        take_memory(attention.blocks)
    start.end("cache")
    check_forward(
        model,
        attention,
        block_size=kv.block_size,
        vocab_size=spec.vocab_size,
        max_len=wanted.max_model_len,
    )
    start.end("first pass")
    executor = TorchExecutor(
        model,
        attention,
        kv.block_size,
        num_host_slots=kv.num_host_slots,
        grammar=wanted.grammar,
    )
    return Machinery(
        model,
        cache,
        kv,
        executor,
        attention.blocks,
        CPU_ROWS,
        "torch" if kernels is None else kernels.instructions,
        _untaken(config.cache, attention),
    )


def _untaken(config: CacheConfig, attention: AttentionBackend) -> UntakenPages | None:
    if config.kv_cache_memory_bytes is not None or not config.take_memory_when_idle:
        return None
    return UntakenPages(attention.blocks)


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
        raise no_memory(kv, cache) from error
