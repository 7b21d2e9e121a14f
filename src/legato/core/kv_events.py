"""Events about cached blocks, from which a router learns the blocks of each server.

The fields and their names are vLLM's, which routers read: each event is a map of MessagePack with
its "type". vLLM's fields for one of several cache groups (`group_idx`) are not used: a router that
knows no groups takes such an event for one of the whole block. A chain of hashes
(`core/block_hash.py`) stands for a prompt. Blocks of requests with a `cache_salt` are not reported:
their contents are private.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from legato.core.block_hash import BlockHash

Medium = Literal["GPU", "CPU"]
"""Place of a block: the cache that steps read, on any device, or host memory."""

DEVICE: Medium = "GPU"
HOST: Medium = "CPU"


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """Consecutive blocks have been computed, or moved to `medium`.

    Attributes:
        block_hashes: hash of each block.
        parent_block_hash: hash of the block before the first; None if the first begins a prompt.
        token_ids: tokens of all blocks, `block_size` of each.
        lora_id, lora_name: always None: there are no adapters.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: None = None
    medium: Medium = DEVICE
    lora_name: None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """Blocks have left `medium`."""

    block_hashes: list[BlockHash]
    medium: Medium = DEVICE


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Nothing is cached but the blocks of later events."""


class HitEnds(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """A hit may end after other blocks than before, in a cache with sliding windows or states.

    The first one, which comes right after `AllBlocksCleared`, says that hits end nowhere else: a
    cache without this event lets them end after any block. It is Legato's own, for its own routers;
    others are sent what follows from it (`observe/cache_mirror.py`).

    Attributes:
        added, removed: hashes of stored blocks; the removed ones are still stored.
    """

    added: list[BlockHash] = []
    removed: list[BlockHash] = []


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared | HitEnds


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Events sent together, in order.

    Attributes:
        ts: time of the batch, in seconds since 1970.
        data_parallel_rank: the engine's rank behind its address; here each address has one engine.
    """

    ts: float
    events: Sequence[KVEvent]
    data_parallel_rank: int = 0
