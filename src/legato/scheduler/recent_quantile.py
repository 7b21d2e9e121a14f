"""A quantile of recent values."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator


class RecentQuantile:
    """Keeps the last values in order. They are few: a list of them is faster than a tree.

    Args:
        window: how many values are kept, None included.
        quantile: in [0, 1).
        values: first values, the oldest first.
    """

    def __init__(self, window: int, quantile: float, values: Iterable[float | None] = ()) -> None:
        self._window = window
        self._quantile = quantile
        self._recent: deque[float | None] = deque()
        self._ordered: list[float] = []
        for value in values:
            self.add(value)

    def __iter__(self) -> Iterator[float | None]:
        """Iterate over the kept values, the oldest first."""
        return iter(self._recent)

    def __len__(self) -> int:
        """Number of kept values that are not None."""
        return len(self._ordered)

    @property
    def value(self) -> float:
        """The quantile; there must be a value."""
        return self._ordered[int(self._quantile * len(self._ordered))]

    def add(self, value: float | None) -> None:
        """Add a value; None or nan only makes older values expire."""
        if value is not None and math.isnan(value):
            value = None  # nan has no place in an order, and could not be removed again
        self._recent.append(value)
        if value is not None:
            insort(self._ordered, value)
        if len(self._recent) > self._window:
            oldest = self._recent.popleft()
            if oldest is not None:
                del self._ordered[bisect_left(self._ordered, oldest)]
