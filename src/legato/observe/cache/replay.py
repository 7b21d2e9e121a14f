"""Keeps the latest batches, for subscribers that missed some."""

from collections import deque
from collections.abc import Iterator

MAX_BATCHES = 4096
_MAX_BYTES = 64 * 2**20


class ReplayBuffer:
    """The latest batches, numbered consecutively; the oldest are dropped first.

    Attributes:
        next_number: number of the next batch, from 0.
    """

    def __init__(self, max_batches: int = MAX_BATCHES, max_bytes: int = _MAX_BYTES) -> None:
        self.next_number = 0
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._kept: deque[bytes] = deque()
        self._num_bytes = 0

    @property
    def first_number(self) -> int:
        """Number of the oldest kept batch; of the next batch if none is kept."""
        return self.next_number - len(self._kept)

    def add(self, payload: bytes) -> int:
        """Keep a batch; return its number."""
        self._kept.append(payload)
        self._num_bytes += len(payload)
        while len(self._kept) > self._max_batches or self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._kept.popleft())
        self.next_number += 1
        return self.next_number - 1

    def since(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Yield the kept batches from `number` on, each after its own number."""
        for kept, payload in enumerate(self._kept, self.first_number):
            if kept >= number:
                yield kept, payload
