"""Which blocks hold each request's keys and values."""

from legato.kv.block_pool import BlockPool


class KVCacheManager:
    """Block tables over one pool. All counts of tokens are totals from the start of the request."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._tables: dict[str, tuple[int, ...]] = {}  # key request id, value its blocks in order

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use, in [0, 1]."""
        return 1.0 - self._pool.num_free / self._pool.num_blocks

    def reserve(self, request_id: str, num_tokens: int, *, spare_blocks: int = 0) -> bool:
        """Make room for the request's first `num_tokens` tokens.

        Args:
            spare_blocks: how many blocks must stay free after that.

        Returns:
            False, and nothing changed, where there are not enough free blocks.
        """
        table = self._tables.get(request_id, ())
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing <= 0:
            return True
        if missing + spare_blocks > self._pool.num_free:
            return False
        block_ids = self._pool.allocate(missing, after=table[-1] if table else None)
        assert block_ids is not None
        self._tables[request_id] = (*table, *block_ids)
        return True

    def block_ids(self, request_id: str) -> tuple[int, ...]:
        """The request's block table: token i lies in block `i // block_size` of it."""
        return self._tables[request_id]

    def release(self, request_id: str) -> None:
        """Give back all blocks of a request; one that holds none is ignored."""
        self._pool.free(self._tables.pop(request_id, ()))
