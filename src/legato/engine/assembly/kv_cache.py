"""The KV cache of a model: what it keeps of each token, and its number of blocks."""

from dataclasses import replace

from legato.core.errors import ConfigError
from legato.core.memory import advice
from legato.engine.assembly.blueprint import Blueprint
from legato.executor.memory import num_cache_blocks, num_swap_blocks
from legato.kv.manager import KVCacheManager
from legato.model.base import SCALE_BYTES, CacheSpec


def configured_cache(blueprint: Blueprint, cache: CacheSpec) -> CacheSpec:
    """Return a model's cache with the configured dtype.

    Raises:
        ConfigError: the scales at the end of a block would not be aligned to their size.
    """
    config = blueprint.config.cache
    cache = replace(cache, is_quantized=config.kv_cache_dtype == "int8")
    if cache.is_quantized and config.block_size * cache.head_dim % SCALE_BYTES:
        raise ConfigError(
            f"with --kv-cache-dtype int8, --block-size times the head size, {cache.head_dim}, must "
            f"be a multiple of {SCALE_BYTES}"
        )
    return cache


def make_kv_manager(blueprint: Blueprint, cache: CacheSpec, memory_bytes: int) -> KVCacheManager:
    """Divide so much memory into blocks.

    Raises:
        ConfigError: one request does not fit into it, or no block into the swap space.
    """
    config = blueprint.config.cache
    bytes_per_block = config.block_size * cache.token_bytes
    num_blocks = num_cache_blocks(
        memory_bytes,
        bytes_per_block=bytes_per_block,
        blocks_per_request=blueprint.blocks_per_request,
        max_num_seqs=blueprint.max_num_seqs,
    )
    num_host_slots = num_swap_blocks(
        config, bytes_per_block=bytes_per_block, device=blueprint.device
    )
    return KVCacheManager(
        num_blocks,
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        num_host_slots=num_host_slots,
    )


def no_memory(num_bytes: int) -> ConfigError:
    """Return the error for a cache of that size."""
    return ConfigError(f"there is no memory for a KV cache of {num_bytes:,} bytes: {advice()}")
