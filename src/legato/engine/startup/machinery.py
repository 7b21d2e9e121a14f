"""What computes steps: a loaded model, its cache and an executor, wherever they are."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from legato.checkpoint.base import Checkpoint
from legato.core.config import EngineConfig
from legato.core.errors import ConfigError
from legato.core.memory import advice
from legato.core.rows import RowCounts
from legato.engine.startup.calibration import SHORTEST_CHUNK
from legato.engine.startup.parts import StartParts
from legato.executor.base import Executor
from legato.executor.draft_model import DraftModel
from legato.executor.kernel_check import KernelChoice
from legato.executor.memory import num_cache_blocks, num_swap_blocks
from legato.executor.untaken_pages import UntakenPages
from legato.grammar.compiled import Grammar
from legato.kv.manager import KVCacheManager
from legato.model.base import SCALE_BYTES, CacheSpec, Model


@dataclass(frozen=True)
class Wanted:
    """What is to be made.

    Attributes:
        config: resolved.
        dtype: of the weights.
        kernels: the native ones that agree with PyTorch's here.
        grammar: of a request's output; asked by the request's id. None where nothing is sampled.
        start: is told of each part of it.
    """

    config: EngineConfig
    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    kernels: KernelChoice
    grammar: Callable[[str], Grammar] | None
    start: StartParts

    @property
    def max_num_seqs(self) -> int:
        """Requests that run at once."""
        count = self.config.scheduler.max_num_seqs
        assert count is not None
        return count

    @property
    def max_samples(self) -> int:
        """Rows of a step that are sampled."""
        return self.config.scheduler.most_samples

    @property
    def max_rows(self) -> int:
        """That a step may have, those of a calibration among them."""
        budget = self.config.scheduler.max_num_batched_tokens
        assert budget is not None
        return max(budget, SHORTEST_CHUNK) + self.max_num_seqs

    @property
    def blocks_per_request(self) -> int:
        """For the longest."""
        return -(-self.max_model_len // self.config.cache.block_size)


@dataclass(frozen=True)
class Machinery:
    """What was made.

    Attributes:
        cache: what the cache keeps of each token.
        blocks: the cache, or rank 0's part of it, [layers, 2, num_blocks, numbers of a block].
        rows: what batches are padded to.
        kernels: the native ones' set of instructions, "torch", or a GPU's "triton".
        untaken: what of the cache's memory may be taken while there is nothing to do.
        draft_model: guesses tokens; None where there is none.
    """

    model: Model
    cache: CacheSpec
    kv: KVCacheManager
    executor: Executor
    blocks: torch.Tensor
    rows: RowCounts
    kernels: str
    untaken: UntakenPages | None = None
    draft_model: DraftModel | None = None


def wanted_cache(wanted: Wanted, cache: CacheSpec) -> CacheSpec:
    """What a model's cache keeps, of which it told its own.

    Raises:
        ConfigError: the scales behind the numbers of a block would not lie at multiples of their
            size.
    """
    config = wanted.config.cache
    cache = replace(cache, is_quantized=config.kv_cache_dtype == "int8")
    if cache.is_quantized and config.block_size * cache.head_dim % SCALE_BYTES:
        raise ConfigError(
            f"with --kv-cache-dtype int8, --block-size times the head size, {cache.head_dim}, must "
            f"be a multiple of {SCALE_BYTES}"
        )
    return cache


def make_kv(wanted: Wanted, cache: CacheSpec, memory_bytes: int) -> KVCacheManager:
    """The blocks of a cache that may take so much memory.

    Raises:
        ConfigError: one request does not fit in, or no block into the swap space.
    """
    config = wanted.config.cache
    bytes_per_block = config.block_size * cache.token_bytes
    num_blocks = num_cache_blocks(
        memory_bytes,
        bytes_per_block=bytes_per_block,
        blocks_per_request=wanted.blocks_per_request,
        max_num_seqs=wanted.max_num_seqs,
    )
    num_host_slots = num_swap_blocks(config, bytes_per_block=bytes_per_block, device=wanted.device)
    return KVCacheManager(
        num_blocks,
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        num_host_slots=num_host_slots,
    )


def no_memory(num_bytes: int) -> ConfigError:
    """For a cache of that size."""
    return ConfigError(f"there is no memory for a KV cache of {num_bytes:,} bytes: {advice()}")
