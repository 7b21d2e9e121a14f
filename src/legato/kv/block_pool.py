"""The free blocks of the KV cache, kept as runs so that a request's blocks lie side by side.

Attention reads a run of adjacent blocks in place, as one strided tensor; a request scattered over
many runs has to be read piece by piece. So a request grows to the right of its last block where it
can, and a new one is put in the middle of the widest gap, which leaves its neighbours room to grow.
"""

from collections.abc import Iterable, Iterator

from sortedcontainers import SortedDict, SortedList


class BlockPool:
    """Hands out block ids in [0, num_blocks). Each call costs O(runs touched * log free runs)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = 0
        self._end_of: SortedDict = SortedDict()  # key start of a free run, value its end
        self._by_width: SortedList = SortedList()  # (width, start) of each free run
        if num_blocks:
            self._insert(0, num_blocks)

    def allocate(self, count: int, *, after: int | None = None) -> list[int] | None:
        """Take `count` blocks, right of block `after` where free; None, taking none, if short.

        Returns:
            The block ids in the order in which tokens should fill them.
        """
        if count > self.num_free:
            return None
        block_ids: list[int] = []
        if after is not None and after + 1 in self._end_of:
            block_ids += self._take(after + 1, after + 1, count)
        while len(block_ids) < count:
            missing = count - len(block_ids)
            width, start = self._by_width[-1]
            block_ids += self._take(start, start + max(0, width - missing) // 2, missing)
        return block_ids

    def free(self, block_ids: Iterable[int]) -> None:
        """Give blocks back.

        Raises:
            ValueError: a block was free already.
        """
        for start, end in runs_of(sorted(block_ids)):
            self._release(start, end)

    def _take(self, run_start: int, start: int, count: int) -> range:
        """Cut [start, start + count), or as much of it as there is, out of a free run."""
        run_end = self._end_of[run_start]
        end = min(start + count, run_end)
        # [run_start, start) stays free | [start, end) is handed out | [end, run_end) stays free
        self._remove(run_start, run_end)
        if run_start < start:
            self._insert(run_start, start)
        if end < run_end:
            self._insert(end, run_end)
        return range(start, end)

    def _release(self, start: int, end: int) -> None:
        position = self._end_of.bisect_right(start)
        if position:
            left_start, left_end = self._end_of.peekitem(position - 1)
            if left_end > start:
                raise ValueError(f"blocks [{start}, {end}) overlap free blocks")
            if left_end == start:
                self._remove(left_start, left_end)
                start = left_start
        position = self._end_of.bisect_left(end)
        if position and self._end_of.peekitem(position - 1)[0] >= start:
            raise ValueError(f"blocks [{start}, {end}) overlap free blocks")
        if end in self._end_of:
            right_end = self._end_of[end]
            self._remove(end, right_end)
            end = right_end
        self._insert(start, end)

    def _insert(self, start: int, end: int) -> None:
        self._end_of[start] = end
        self._by_width.add((end - start, start))
        self.num_free += end - start

    def _remove(self, start: int, end: int) -> None:
        del self._end_of[start]
        self._by_width.remove((end - start, start))
        self.num_free -= end - start


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
