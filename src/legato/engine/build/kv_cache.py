"""The KV cache of a model: what it keeps of each token, in which groups, and how many blocks."""

import math
from collections.abc import Sequence
from dataclasses import replace

from legato.core.errors import ConfigError
from legato.core.memory_limits import advice
from legato.core.plan import FIRST_STATE
from legato.engine.build.blueprint import Blueprint
from legato.executor.cache_memory import num_cache_blocks, num_swap_blocks
from legato.kv.manager import KVCacheManager
from legato.kv.state_slots import CHUNK_MULTIPLE, StateSlots
from legato.kv.window_group import WindowGroup
from legato.kv.window_groups import WindowGroups
from legato.kv.window_need import WindowNeed, num_windowed_requests, window_bytes
from legato.model.model import SCALE_BYTES, CacheGroup, CacheSpec

_STATES_SHARE = 0.5
"""Share of the cache that states of running requests may take."""

_CHECKPOINTS_SHARE = 0.2
"""Share of the cache for kept states, unless their number is set. Keys and values have the rest."""

_LEAST_SPACING = 512
"""Fewest tokens between checkpoints within a prompt, since each ends a chunk."""


def configured_cache(blueprint: Blueprint, cache: CacheSpec) -> CacheSpec:
    """Return a model's cache with the configured dtype.

    Raises:
        ConfigError: latents are to be quantized, or the scales at the end of a block would not be
            aligned to their size.
    """
    config = blueprint.config.cache
    cache = replace(cache, is_quantized=config.kv_cache_dtype == "int8")
    if cache.is_quantized and not cache.has_values:
        raise ConfigError(
            "--kv-cache-dtype int8 is not supported for a model with latent attention"
        )
    for head_dim in {layer.head_dim for layer in cache.layers}:
        if cache.is_quantized and blueprint.block_size * head_dim % SCALE_BYTES:
            raise ConfigError(
                f"with --kv-cache-dtype int8, --block-size times the head size, {head_dim}, must "
                f"be a multiple of {SCALE_BYTES}"
            )
    return cache


def make_kv_manager(
    blueprint: Blueprint, groups: Sequence[CacheGroup], memory_bytes: int
) -> KVCacheManager:
    """Divide so much memory into blocks, and slots for states if the model has recurrent layers.

    Of the swap space, windows and states have the share that they have of the memory.

    Raises:
        ConfigError: one request does not fit into it, or no block into the swap space.
    """
    config = blueprint.config.cache
    kept, *windowed = groups
    swap_bytes, swap_share = config.swap_space_bytes, config.swap_space_bytes / memory_bytes
    states = _state_slots(blueprint, memory_bytes, kept.cache.token_bytes, swap_share)
    if states is not None:
        memory_bytes -= states.num_slots * blueprint.state_bytes
        swap_bytes -= states.num_host_slots * blueprint.state_bytes
    bytes_per_block = blueprint.block_size * kept.cache.token_bytes
    windows: WindowGroups | None = None
    if windowed:
        windows, taken_bytes = _windows(
            blueprint, windowed, memory_bytes, bytes_per_block, swap_share
        )
        memory_bytes -= taken_bytes
        swap_bytes -= sum(
            made.spilled.num_slots * blueprint.block_size * group.cache.token_bytes
            for made, group in zip(windows.groups, windowed, strict=True)
        )
    num_blocks = num_cache_blocks(
        memory_bytes,
        bytes_per_block=bytes_per_block,
        blocks_per_request=blueprint.blocks_per_request,
        max_num_seqs=blueprint.max_num_seqs,
    )
    num_host_slots = num_swap_blocks(
        swap_bytes, bytes_per_block=bytes_per_block, device=blueprint.device
    )
    return KVCacheManager(
        num_blocks,
        blueprint.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        num_host_slots=num_host_slots,
        states=states,
        windows=windows,
    )


def _windows(
    blueprint: Blueprint,
    groups: Sequence[CacheGroup],
    memory_bytes: int,
    bytes_per_block: int,
    swap_share: float,
) -> tuple[WindowGroups, int]:
    """Return the blocks of window groups, and their size in bytes.

    Args:
        swap_share: swap space for each byte of the memory.
    """
    block_size, scheduler = blueprint.block_size, blueprint.config.scheduler
    assert scheduler.num_steps_in_flight is not None
    needs = [
        WindowNeed.of(
            group.window,
            block_bytes=block_size * group.cache.token_bytes,
            block_size=block_size,
            rows_in_flight=scheduler.num_steps_in_flight * blueprint.max_rows,
            longest=blueprint.blocks_per_request,
        )
        for group in groups
        if group.window is not None
    ]
    num_requests = num_windowed_requests(
        needs,
        memory_bytes,
        request_bytes=blueprint.blocks_per_request * bytes_per_block,
        # Half of them are for blocks that stay cached.
        most=2 * blueprint.max_num_seqs,
    )
    sizes = [need.num_blocks(num_requests) for need in needs]
    most_running = min(num_requests, blueprint.max_num_seqs)
    made = [
        WindowGroup(
            need.window,
            count,
            block_size,
            num_host_slots=int(swap_share * count),
            num_spare=count - need.num_blocks(most_running),
        )
        for need, count in zip(needs, sizes, strict=True)
    ]
    if blueprint.config.transfer.kv_role is not None and not all(g.num_spare for g in made):
        raise ConfigError(
            "--kv-role keeps blocks of sliding windows for other engines, besides those of "
            f"{most_running:,} running requests, and there is no memory for them: raise "
            "--kv-cache-memory or lower --max-num-seqs"
        )
    return (
        WindowGroups(made, block_size=block_size, max_requests=most_running),
        window_bytes(needs, num_requests),
    )


def _state_slots(
    blueprint: Blueprint, memory_bytes: int, token_bytes: int, swap_share: float
) -> StateSlots | None:
    """Divide the states' share of the memory among requests, at most as many as may run.

    Within a prompt, checkpoints take about as much memory as the keys and values between them.

    Args:
        token_bytes: size of a token's keys and values.
        swap_share: swap space for each byte of the memory.
    """
    if not blueprint.state_bytes:
        return None
    depth = blueprint.config.scheduler.num_steps_in_flight
    assert depth is not None
    one = StateSlots(1, depth)
    room = int(_STATES_SHARE * memory_bytes) - FIRST_STATE * blueprint.state_bytes
    num_requests = room // (one.slots_per_request * blueprint.state_bytes)
    if num_requests < 1:
        needed = int(one.num_slots * blueprint.state_bytes / _STATES_SHARE)
        raise ConfigError(
            f"the recurrent states of one request need a cache of {needed:,} bytes, but it has "
            f"{memory_bytes:,}: raise --kv-cache-memory"
        )
    num_requests = min(num_requests, blueprint.max_num_seqs)
    block_size = blueprint.block_size
    unit = math.lcm(CHUNK_MULTIPLE, block_size)
    spacing = unit
    while spacing < max(_LEAST_SPACING, blueprint.state_bytes / token_bytes):
        spacing *= 2
    needed = (FIRST_STATE + num_requests * one.slots_per_request) * blueprint.state_bytes
    needed += blueprint.blocks_per_request * block_size * token_bytes
    # At most one for each unit of tokens, and the longest request must fit beside them.
    room = min(int(_CHECKPOINTS_SHARE * memory_bytes), memory_bytes - needed)
    most = min(max(0, room) // blueprint.state_bytes, memory_bytes // (unit * token_bytes))
    num_spare_slots = _num_checkpoints(blueprint, memory_bytes, most)
    if blueprint.config.transfer.kv_role is not None and not num_spare_slots:
        raise ConfigError(
            "--kv-role keeps states for other engines, besides those of running requests, and "
            "there are none: raise --state-checkpoints or --kv-cache-memory"
        )
    num_slots = num_requests * one.slots_per_request + num_spare_slots
    return StateSlots(
        num_requests,
        depth,
        block_size=block_size if blueprint.config.cache.enable_prefix_caching else None,
        num_spare_slots=num_spare_slots,
        unit=unit,
        spacing=spacing,
        num_host_slots=int(swap_share * num_slots),
    )


def _num_checkpoints(blueprint: Blueprint, memory_bytes: int, usual: int) -> int:
    """Return how many states are kept for later requests in any case: `usual`, unless configured.

    Raises:
        ConfigError: the configured number is too large for the memory.
    """
    config = blueprint.config.cache
    if not config.enable_prefix_caching:
        return 0
    if config.state_checkpoints is None:
        return usual
    num_bytes = config.state_checkpoints * blueprint.state_bytes
    if num_bytes > (1.0 - _STATES_SHARE) * memory_bytes:
        raise ConfigError(
            f"{config.state_checkpoints:,} state checkpoints need {num_bytes:,} bytes, more than "
            f"half of a cache of {memory_bytes:,}: lower --state-checkpoints or raise "
            "--kv-cache-memory"
        )
    return config.state_checkpoints


def no_memory(num_bytes: int) -> ConfigError:
    """Return the error for a cache of that size."""
    return ConfigError(f"there is no memory for a KV cache of {num_bytes:,} bytes: {advice()}")
