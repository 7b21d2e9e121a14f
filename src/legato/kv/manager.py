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

    def fits(self, request_id: str, num_tokens: int, *, spare_blocks: int = 0) -> bool:
        """Whether `reserve` would succeed and leave `spare_blocks` free."""
        missing = -(-num_tokens // self.block_size) - len(self._tables.get(request_id, ()))
        return missing <= 0 or missing + spare_blocks <= self._pool.num_free

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        """Make room for the request's first `num_tokens` tokens.

        Returns:
            False, and nothing changed, where there are not enough free blocks.
        """
        # Asked for each decode of each step, nearly always in vain.
        table = self._tables.get(request_id, ())
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing <= 0:
            return True
        if missing > self._pool.num_free:
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
