"""How much came over the link, and how long it was busy."""

import time
from collections.abc import Callable


class LinkUse:
    """Written by the thread that reads; others may look.

    Reads that go on at once share the link: its time is counted once.

    Attributes:
        num_bytes: of reads that have ended well.
        busy_s: how long any read went on, up to the end of the last.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_bytes = 0
        self.busy_s = 0.0
        self._clock = clock
        self._num_reads = 0
        self._since_s = 0.0

    def begin(self) -> None:
        """A read begins."""
        if not self._num_reads:
            self._since_s = self._clock()
        self._num_reads += 1

    def end(self, num_bytes: int) -> None:
        """A read has ended, which brought so much; 0 where it failed."""
        now_s = self._clock()
        self.busy_s += now_s - self._since_s
        self._since_s = now_s
        self._num_reads -= 1
        self.num_bytes += num_bytes
