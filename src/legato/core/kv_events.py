"""What becomes of cached blocks, told so that a router knows which server has which.

The fields and their names are vLLM's, which routers read: each event is a map of MessagePack with
its "type". A chain of hashes (`core/block_hash.py`) stands for a prompt. Blocks of requests with a
`cache_salt` are not told of: nobody else is to know what is in them.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from legato.core.block_hash import BlockHash

Medium = Literal["GPU", "CPU"]
"""Where a block lies: in the cache that steps read, on whichever device, or in host memory."""

DEVICE: Medium = "GPU"
HOST: Medium = "CPU"


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """Blocks behind one another have been computed, or have been moved to `medium`.

    Attributes:
        block_hashes: of each.
        parent_block_hash: of the block before the first; None where that begins a prompt.
        token_ids: of all blocks, `block_size` of each.
        lora_id, lora_name: there are no adapters.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: None = None
    medium: Medium = DEVICE
    lora_name: None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """Blocks are not in `medium` any more."""

    block_hashes: list[BlockHash]
    medium: Medium = DEVICE


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Nothing is cached but for what is told from here on."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Events that go together, in their order.

    Attributes:
        ts: when, in seconds since 1970.
        data_parallel_rank: of the engine among those behind one address; here there is one.
    """

    ts: float
    events: Sequence[KVEvent]
    data_parallel_rank: int = 0
