"""Sizes the KV cache, touches its memory ahead of use, and reports when memory runs out."""

import logging
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from legato.core.cache_config import CacheConfig
from legato.core.errors import ConfigError
from legato.core.memory_limits import free_memory_bytes, is_shortage

logger = logging.getLogger(__name__)

_DEFAULT_UTILIZATION = 0.25


def cpu_cache_bytes(config: CacheConfig) -> int:
    """Return the size of a KV cache in host memory."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    return int(free_memory_bytes() * (config.gpu_memory_utilization or _DEFAULT_UTILIZATION))


def num_cache_blocks(
    memory_bytes: int, *, bytes_per_block: int, blocks_per_request: int, max_num_seqs: int
) -> int:
    """Return how many blocks the memory holds, at most as many as running requests can fill.

    Args:
        blocks_per_request: blocks of one request of `max_model_len` tokens.

    Raises:
        ConfigError: not even one such request fits.
    """
    num_blocks = min(memory_bytes // bytes_per_block, blocks_per_request * max_num_seqs)
    if num_blocks < blocks_per_request:
        raise ConfigError(
            f"one request of max_model_len tokens needs {blocks_per_request * bytes_per_block:,} "
            f"bytes of KV cache, but it has {memory_bytes:,}: raise --kv-cache-memory or lower "
            "--max-model-len"
        )
    return num_blocks


def num_swap_blocks(swap_bytes: int, *, bytes_per_block: int, device: torch.device) -> int:
    """Return how many blocks fit into the swap space.

    Args:
        swap_bytes: the swap space that is for blocks.

    Raises:
        ConfigError: not even one block fits.
    """
    num_blocks = swap_bytes // bytes_per_block
    if swap_bytes and not num_blocks:
        raise ConfigError(
            f"one block needs {bytes_per_block:,} bytes, but the swap space has "
            f"{swap_bytes:,} for blocks: raise --swap-space"
        )
    if num_blocks and device.type == "cpu":
        logger.warning("on a CPU, --kv-cache-memory makes more of the memory than --swap-space")
    elif num_blocks:
        logger.warning("--swap-space is experimental on a GPU: it was never measured on one")
    return num_blocks


def take_memory(values: torch.Tensor) -> None:
    """Touch all pages of a contiguous, uninitialized tensor, so that its memory is allocated.

    A first touch in the middle of a step costs a microsecond or more, and ten in a virtual machine
    whose host has not allocated the page either.
    """
    values.view(torch.uint8).flatten()[:: mmap.PAGESIZE] = 0


@contextmanager
def raising_memory_error() -> Iterator[None]:
    """Turn PyTorch's errors for exhausted memory, on any device, into `MemoryError`.

    NumPy and native kernels raise `MemoryError` themselves.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        raise MemoryError(str(error)) from error
