"""Measures the bytes read over a link, and its busy time."""

import time
from collections.abc import Callable


class LinkUse:
    """Written by the reading thread; other threads may read it.

    Concurrent reads share the link, so their time is counted once.

    Attributes:
        num_bytes: of reads that have succeeded.
        busy_s: seconds with a read in progress, up to the end of the last read.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_bytes = 0
        self.busy_s = 0.0
        self._clock = clock
        self._num_reads = 0
        self._since_s = 0.0

    def begin(self) -> None:
        """Record the start of a read."""
        if not self._num_reads:
            self._since_s = self._clock()
        self._num_reads += 1

    def end(self, num_bytes: int) -> None:
        """Record the end of a read and its bytes, 0 if it failed."""
        now_s = self._clock()
        self.busy_s += now_s - self._since_s
        self._since_s = now_s
        self._num_reads -= 1
        self.num_bytes += num_bytes
