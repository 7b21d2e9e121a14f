"""Loads a model on a CPU, or a rank's part of it: kernels, layers and the cache's memory."""

import logging
from collections.abc import Sequence

import torch

from legato.checkpoint.loader import load_model
from legato.core.cache_config import CacheConfig
from legato.core.errors import ConfigError
from legato.core.rows import CPU_ROWS
from legato.engine.build.blueprint import Blueprint
from legato.engine.build.kv_cache import no_memory
from legato.executor.attention.attention_backend import AttentionBackend
from legato.executor.attention.native_backend import (
    BLOCK_MULTIPLE,
    NativeAttentionBackend,
    NativeGroupsBackend,
)
from legato.executor.attention.torch_backend import TorchAttentionBackend
from legato.executor.attention.torch_groups import TorchGroupsBackend
from legato.executor.cache_memory import raising_memory_error, take_memory
from legato.model.communicator import ALONE, Communicator
from legato.model.model import CacheGroup, Model
from legato.model.native_attention import ReadsNativeCache
from legato.model.native_kernels import NativeKernels, native_instructions, unbuilt_instructions
from legato.model.native_support import why_not_native
from legato.model.packed_linear import PackedDecoder

logger = logging.getLogger(__name__)


def load_cpu_model(
    blueprint: Blueprint, kernels: NativeKernels | None, communicator: Communicator = ALONE
) -> Model:
    """Load a model, or a rank's part of it; raises like `build_engine`."""
    model = load_model(
        blueprint.checkpoint,
        dtype=blueprint.dtype,
        device=blueprint.device,
        kernels=kernels,
        quantization=blueprint.config.model.quantization,
        communicator=communicator,
    )
    if isinstance(model, PackedDecoder):
        model.compile_kernels(
            num_rows=CPU_ROWS.up_to(blueprint.max_rows),
            num_samples=CPU_ROWS.up_to(blueprint.max_samples),
        )
    return model


def native_kernels(blueprint: Blueprint, *, num_threads: int | None = None) -> NativeKernels | None:
    """Return the kernels of native layers; None if PyTorch computes the layers.

    Args:
        num_threads: None for as many as PyTorch has.

    Raises:
        ConfigError: the configured kernels cannot run here, or compute wrong numbers.
    """
    config, choice = blueprint.config, blueprint.kernels
    asked = config.model.kernels
    if asked == "torch":
        return None
    part = blueprint.checkpoint.spec.part(config.model.tensor_parallel_size)
    reason = why_not_native(part, blueprint.dtype, blueprint.device)
    if not reason and blueprint.block_size % BLOCK_MULTIPLE:
        reason = f"the block size {blueprint.block_size} is not a multiple of {BLOCK_MULTIPLE}"
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
        reason = "those for this processor run on request alone: --kernels plain"
        if choice.rejected:
            reason = "they compute wrong numbers on this machine"
    if asked != "auto":
        raise ConfigError(f"the {asked} kernels cannot run here: {reason}")
    logger.info("PyTorch computes the layers, more slowly than native kernels: %s", reason)
    return None


def make_attention(
    model: Model, groups: Sequence[CacheGroup], sizes: Sequence[int], config: CacheConfig
) -> AttentionBackend:
    """Make the cache of a model, or of a rank's part; a cache of a given size is allocated now.

    Args:
        groups: of the model's layers.
        sizes: blocks of each group.

    Raises:
        ConfigError: there is not enough memory.
    """
    assert config.block_size is not None, "the configuration was resolved"
    num_tokens = [count * config.block_size for count in sizes]
    num_bytes = sum(
        count * group.cache.token_bytes for count, group in zip(num_tokens, groups, strict=True)
    )
    try:
        with raising_memory_error():
            attention = _attention(model, groups, sizes, config.block_size)
    except MemoryError as error:
        raise no_memory(num_bytes) from error
    if config.kv_cache_memory_bytes is not None:
        logger.info("taking %.2f GiB for the KV cache", num_bytes / 2**30)
        for blocks in attention.blocks:
            take_memory(blocks)
    return attention


def _attention(
    model: Model, groups: Sequence[CacheGroup], sizes: Sequence[int], block_size: int
) -> AttentionBackend:
    pairs = list(zip(groups, sizes, strict=True))
    if isinstance(model, ReadsNativeCache):
        native = [
            NativeAttentionBackend(model, group.cache, num_blocks=count, block_size=block_size)
            for group, count in pairs
        ]
        return native[0] if len(native) == 1 else NativeGroupsBackend(groups, native)
    backends = [
        TorchAttentionBackend(
            group.cache, num_blocks=count, block_size=block_size, device=model.device
        )
        for group, count in pairs
    ]
    return backends[0] if len(backends) == 1 else TorchGroupsBackend(groups, backends)
