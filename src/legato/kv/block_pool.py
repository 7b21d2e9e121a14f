"""The free blocks of the KV cache, kept as runs so that a request's blocks are adjacent.

Attention reads a run of adjacent blocks in place, as one strided tensor; a request scattered over
many runs has to be read piece by piece. So a request grows to the right of its last block if it
can, and a new request starts in the middle of the widest gap, which leaves its neighbours room.
"""

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

_MOST_STALE = 64


class BlockPool:
    """Hands out block ids in [0, num_blocks). Each call costs O(runs touched * log free runs)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = 0
        self._is_free = bytearray(num_blocks)
        self._end_of: dict[int, int] = {}  # key start of a free run, value its end
        self._start_of: dict[int, int] = {}  # the other way round
        # Heap of -(width * stride + start) of each free run, and of stale runs.
        self._widest: list[int] = []
        self._stride = num_blocks + 1
        if num_blocks:
            self._release(0, num_blocks)

    def allocate(self, count: int, *, after: int | None = None) -> list[int] | None:
        """Take `count` blocks, to the right of block `after` if possible.

        Returns:
            The block ids in the order in which tokens should fill them; None, taking no block, if
            too few are free.
        """
        if count > self.num_free:
            return None
        block_ids: list[int] = []
        if after is not None and count and after + 1 in self._end_of:
            block_ids += self._take(after + 1, after + 1, count)
        while len(block_ids) < count:
            missing = count - len(block_ids)
            start, end = self._widest_run()
            block_ids += self._take(start, start + max(0, end - start - missing) // 2, missing)
        return block_ids

    def free(self, block_ids: Iterable[int]) -> None:
        """Give blocks back.

        Raises:
            ValueError: a block was free already.
        """
        for start, end in runs_of(sorted(block_ids)):
            if self._is_free.find(1, start, end) >= 0:
                raise ValueError(f"blocks [{start}, {end}) overlap free blocks")
            self._release(start, end)

    def _take(self, run_start: int, start: int, count: int) -> range:
        """Cut [start, start + count), or the part within it, out of a free run."""
        run_end = self._end_of.pop(run_start)
        end = min(start + count, run_end)
        # [run_start, start) stays free | [start, end) is handed out | [end, run_end) stays free
        if end < run_end:
            self._insert(end, run_end)
        else:
            del self._start_of[run_end]
        if run_start < start:
            self._insert(run_start, start)
        self._is_free[start:end] = bytes(end - start)
        self.num_free -= end - start
        return range(start, end)

    def _release(self, start: int, end: int) -> None:
        self._is_free[start:end] = b"\1" * (end - start)
        self.num_free += end - start
        if end in self._end_of:
            end = self._end_of.pop(end)
        if start in self._start_of:
            start = self._start_of.pop(start)
        self._insert(start, end)

    def _widest_run(self) -> tuple[int, int]:
        """Return the widest free run [start, end), the last of equals; there must be one."""
        while True:
            width, start = divmod(-self._widest[0], self._stride)
            if self._end_of.get(start) == start + width:
                return start, start + width
            heappop(self._widest)

    def _insert(self, start: int, end: int) -> None:
        self._end_of[start] = end
        self._start_of[end] = start
        heappush(self._widest, (start - end) * self._stride - start)
        if len(self._widest) > _MOST_STALE + 2 * len(self._end_of):
            self._widest = [(s - e) * self._stride - s for s, e in self._end_of.items()]
            heapify(self._widest)


def runs_of(block_ids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Split block ids, in their order, into maximal runs [start, end) of adjacent blocks."""
    start = end = None
    for block_id in block_ids:
        if block_id == end:
            end += 1
            continue
        if start is not None and end is not None:
            yield start, end
        start, end = block_id, block_id + 1
    if start is not None and end is not None:
        yield start, end
