"""The machinery on a CPU: native layers where they can run, PyTorch's elsewhere."""

import logging
from typing import TYPE_CHECKING

import torch

from legato.checkpoint.loader import load_model
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
from legato.executor.draft_model import DraftModel
from legato.executor.first_pass import check_forward
from legato.executor.memory import host_cache_bytes, raising_memory_error, take_memory
from legato.executor.torch_executor import TorchExecutor
from legato.executor.untaken_pages import UntakenPages
from legato.model.base import CacheSpec, Model
from legato.model.communicator import ALONE, Communicator
from legato.model.native import (
    NativeKernels,
    NativeModel,
    native_instructions,
    unbuilt_instructions,
    why_not_native,
)
from legato.model.packed_linear import PackedDecoder

if TYPE_CHECKING:
    from legato.engine.startup.draft import LoadedDraft

logger = logging.getLogger(__name__)


def host_machinery(wanted: Wanted) -> Machinery:
    """Load the model and make its cache; raises as `build_engine`."""
    config, start, spec = wanted.config, wanted.start, wanted.checkpoint.spec
    check_steps_in_flight(config)
    kernels = native_kernels(wanted)
    start.end("description")
    model = load_host_model(wanted, kernels)
    start.end("weights")
    cache = wanted_cache(wanted, model.cache)
    draft = _load_draft(wanted, kernels)
    kv = make_kv(wanted, cache, _cache_bytes(config.cache, cache, draft))
    attention = make_attention(model, cache, kv.num_blocks, config.cache)
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
        untaken_pages(config.cache, attention),
        _draft_model(wanted, draft, kv.num_blocks),
    )


def _load_draft(wanted: Wanted, kernels: NativeKernels | None) -> "LoadedDraft | None":
    """Its weights take their memory before the cache's is counted."""
    name = wanted.config.model.speculative_model
    if name is None:
        return None
    # Imported here because it is made of what is here.
    from legato.engine.startup.draft import load_draft

    draft = load_draft(wanted, name, kernels)
    wanted.start.end("draft model")
    return draft


def _cache_bytes(config: CacheConfig, cache: CacheSpec, draft: "LoadedDraft | None") -> int:
    """Of the model's cache: a draft model's has a part of the memory, and holds as many tokens."""
    num_bytes = host_cache_bytes(config)
    if draft is None:
        return num_bytes
    return num_bytes * cache.token_bytes // (cache.token_bytes + draft.cache.token_bytes)


def _draft_model(wanted: Wanted, draft: "LoadedDraft | None", num_blocks: int) -> DraftModel | None:
    if draft is None:
        return None
    from legato.engine.startup.draft import make_draft_model

    draft_model = make_draft_model(draft, num_blocks)
    wanted.start.end("draft model")
    return draft_model


def check_steps_in_flight(config: EngineConfig) -> None:
    """Raises `ConfigError`: there are to be several."""
    if config.scheduler.num_steps_in_flight != 1:
        raise ConfigError(
            "two steps in flight are for a GPU: on a CPU both would want the same cores"
        )


def load_host_model(
    wanted: Wanted, kernels: NativeKernels | None, communicator: Communicator = ALONE
) -> Model:
    """A model, or a rank's part of it; raises as `build_engine`."""
    model = load_model(
        wanted.checkpoint,
        dtype=wanted.dtype,
        device=wanted.device,
        kernels=kernels,
        quantization=wanted.config.model.quantization,
        communicator=communicator,
    )
    if isinstance(model, PackedDecoder):
        model.compile_kernels(
            num_rows=CPU_ROWS.up_to(wanted.max_rows),
            num_samples=CPU_ROWS.up_to(wanted.max_samples),
        )
    return model


def untaken_pages(config: CacheConfig, attention: AttentionBackend) -> UntakenPages | None:
    if config.kv_cache_memory_bytes is not None or not config.take_memory_when_idle:
        return None
    return UntakenPages(attention.blocks)


def native_kernels(wanted: Wanted, *, num_threads: int | None = None) -> NativeKernels | None:
    """Kernels for native layers; None where PyTorch's kernels are asked for, or have to do.

    Args:
        num_threads: None takes as many as PyTorch has.

    Raises:
        ConfigError: the kernels that are asked for cannot run here, or compute wrong numbers.
    """
    config, choice = wanted.config, wanted.kernels
    asked = config.model.kernels
    if asked == "torch":
        return None
    part = wanted.checkpoint.spec.part(config.model.tensor_parallel_size)
    reason = why_not_native(part, wanted.dtype, wanted.device)
    if not reason and config.cache.block_size % BLOCK_MULTIPLE:
        reason = f"the block size {config.cache.block_size} is not a multiple of {BLOCK_MULTIPLE}"
    known = native_instructions()
    if not reason and asked not in ("auto", *known):
        reason = f"only {', '.join(known)} can"
    if not reason:
        for instructions, disagreement in choice.rejected.items():
            logger.error(
                "WRONG KERNELS: those for %s disagree with PyTorch's on this machine and are not "
                "used (%s). Please report it, with the processor's name",
                instructions,
                disagreement,
            )
        if choice.instructions is not None:
            if asked == "auto" and (unbuilt := unbuilt_instructions()):
                names = ", ".join(unbuilt)
                logger.warning("no %s kernels were built: the compiler did not know how", names)
            return NativeKernels(num_threads or torch.get_num_threads(), choice.instructions)
        reason = "they compute wrong numbers on this machine"
    if asked != "auto":
        raise ConfigError(f"the {asked} kernels cannot run here: {reason}")
    logger.info("PyTorch computes the layers, more slowly than native kernels: %s", reason)
    return None


def make_attention(
    model: Model, cache: CacheSpec, num_blocks: int, config: CacheConfig
) -> AttentionBackend:
    """The cache of a model, or of a rank's part of it, whose memory is taken if it has a size.

    Raises:
        ConfigError: there is no memory for it.
    """
    num_bytes = num_blocks * config.block_size * cache.token_bytes
    sizes = {"num_blocks": num_blocks, "block_size": config.block_size}
    try:
        with raising_memory_error():
            attention: AttentionBackend = (
                NativeAttentionBackend(model, cache, **sizes)
                if isinstance(model, NativeModel)
                else TorchAttentionBackend(cache, **sizes, device=model.device)
            )
    except MemoryError as error:
        raise no_memory(num_bytes) from error
    if config.kv_cache_memory_bytes is not None:
        logger.info("taking %.2f GiB for the KV cache", num_bytes / 2**30)
        take_memory(attention.blocks)
    return attention
