"""The latest batches, for those who have missed some."""

from collections import deque
from collections.abc import Iterator

MAX_BATCHES = 4096
_MAX_BYTES = 64 * 2**20


class ReplayBuffer:
    """Batches by their numbers, which follow one another; the oldest go first.

    Attributes:
        next_number: of the next batch; the first one's is 0.
    """

    def __init__(self, max_batches: int = MAX_BATCHES, max_bytes: int = _MAX_BYTES) -> None:
        self.next_number = 0
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._kept: deque[bytes] = deque()
        self._num_bytes = 0

    @property
    def first_number(self) -> int:
        """Of the oldest batch that is kept, or where none is, of the next."""
        return self.next_number - len(self._kept)

    def add(self, payload: bytes) -> int:
        """Keep a batch; returns its number."""
        self._kept.append(payload)
        self._num_bytes += len(payload)
        while len(self._kept) > self._max_batches or self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._kept.popleft())
        self.next_number += 1
        return self.next_number - 1

    def since(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Those from `number` on that are kept, each with its own."""
        for kept, payload in enumerate(self._kept, self.first_number):
            if kept >= number:
                yield kept, payload
