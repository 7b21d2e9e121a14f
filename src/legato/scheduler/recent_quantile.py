"""A quantile of what came lately."""

import math
from collections import deque
from collections.abc import Iterable, Iterator

from sortedcontainers import SortedList


class RecentQuantile:
    """Keeps the last values in order; adding one takes O(log n).

    Args:
        window: how many are kept, those that say nothing among them.
        quantile: in [0, 1).
        values: to begin with, the oldest first.
    """

    def __init__(self, window: int, quantile: float, values: Iterable[float | None] = ()) -> None:
        self._window = window
        self._quantile = quantile
        self._recent: deque[float | None] = deque()
        self._ordered = SortedList()
        for value in values:
            self.add(value)

    def __iter__(self) -> Iterator[float | None]:
        """Those kept, the oldest first."""
        return iter(self._recent)

    def __len__(self) -> int:
        """How many of those kept say something."""
        return len(self._ordered)

    @property
    def fullness(self) -> float:
        """How many are kept, as a share of the most, those that say nothing among them."""
        return len(self._recent) / self._window

    @property
    def value(self) -> float:
        """Asked only where something is known."""
        return float(self._ordered[int(self._quantile * len(self._ordered))])

    def add(self, value: float | None) -> None:
        """Take in the next one; None, or nan, says nothing but lets others expire."""
        if value is not None and math.isnan(value):
            value = None  # it has no place in an order, and could not be found there again
        self._recent.append(value)
        if value is not None:
            self._ordered.add(value)
        if len(self._recent) > self._window:
            oldest = self._recent.popleft()
            if oldest is not None:
                self._ordered.remove(oldest)
