"""Blocks that a transfer may still write to, kept from all requests."""

from collections.abc import Iterator

from legato.kv.block_ids import BlockIds, block_array
from legato.kv.block_pool import BlockPool
from legato.kv.block_tables import BlockTables, renamed
from legato.kv.holds import Holds


class Quarantine:
    """Replaces the missing blocks of transfers that can be neither ended nor stopped.

    The blocks get other blocks in their place, in the tree and for all requests that share them.
    """

    def __init__(self, pool: BlockPool, tables: BlockTables, holds: Holds) -> None:
        self._pool = pool
        self._tables = tables
        self._holds = holds
        # Key request id, value blocks that its transfer may still write to; no request has them.
        self._block_ids: dict[str, BlockIds] = {}

    def __iter__(self) -> Iterator[BlockIds]:
        """Iterate over the blocks of each transfer."""
        return iter(self._block_ids.values())

    def can_begin(self, request_id: str) -> bool:
        """Whether there are enough free blocks for `begin`."""
        hold = self._holds[request_id]
        return len(hold.blocks(hold.num_arrived)) <= self._tables.num_free_blocks

    def begin(self, request_id: str) -> bool:
        """Replace the blocks that a transfer may write to at any time.

        Returns:
            whether there were enough free blocks; if not, nothing has changed.
        """
        hold = self._holds[request_id]
        left = hold.blocks(hold.num_arrived)
        fresh = self._tables.own(block_array())
        if not self._tables.grow(fresh, len(left)):
            return False
        replaced = dict(zip(left, fresh.block_ids, strict=True))
        node = hold.last
        while node.parent is not None:
            node.places = renamed(node.places, replaced)
            node = node.parent
        self._tables.rename(replaced)
        self._holds.rename(replaced)
        self._block_ids[request_id] = left
        return True

    def end(self, request_id: str) -> None:
        """Free the blocks of a transfer that writes to them no more."""
        self._pool.free(self._block_ids.pop(request_id))
