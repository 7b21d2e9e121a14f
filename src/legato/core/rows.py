"""How many rows a batch is computed with."""

import msgspec


class RowCounts(msgspec.Struct, frozen=True, cache_hash=True, forbid_unknown_fields=True):
    """The few numbers of rows that batches are padded to.

    Attributes:
        stairs: of pairs (bound, multiple), by their bounds: up to `bound` rows, the number is a
            multiple of `multiple`.
        multiple: what it is a multiple of beyond them.
    """

    stairs: tuple[tuple[int, int], ...]
    multiple: int

    def padded(self, num_rows: int) -> int:
        """The number of rows, at least `num_rows`, that a batch is padded to."""
        for bound, multiple in self.stairs:
            if num_rows <= bound:
                return -(-num_rows // multiple) * multiple
        return -(-num_rows // self.multiple) * self.multiple

    def full(self, num_rows: int) -> int:
        """The largest number, at most `num_rows`, that is padded by nothing."""
        low = 0
        for bound, multiple in self.stairs:
            if num_rows < bound:
                return max(low, num_rows // multiple * multiple)
            low = bound
        return max(low, num_rows // self.multiple * self.multiple)

    def up_to(self, num_rows: int) -> list[int]:
        """Every number that a batch of 1 to `num_rows` rows is padded to."""
        return sorted({self.padded(n) for n in range(1, num_rows + 1)})


CPU_ROWS = RowCounts(((16, 1), (256, 16), (1024, 32)), 64)
"""Matrix kernels are compiled for each number of rows they meet, which takes longer than running
them, and chunks under a time budget come in every length. So there are few numbers: all up to 16,
and about one in sixteen of those above."""

GPU_ROWS = RowCounts(((1, 1), (2, 2), (4, 4), (8, 8), (64, 16), (256, 32)), 128)
"""A graph is captured for each number. Decodes are close to one of them; beyond, tiles of matrix
products have 128 rows, so that fewer would take as long."""
