"""Durations of a draft model's passes: measured at the start, then updated by every pass."""

from bisect import bisect_right
from collections.abc import Sequence

_RATE = 0.1
"""Share of its error by which a pass corrects the expectation: half after 7."""
_MOST_SURPRISING = 0.5
"""Largest relative residual that counts: an interruption does not mean a slower machine."""


class PassTimes:
    """Seconds by the number of rows, interpolated between the measured numbers.

    Args:
        measured: pairs (rows, seconds) in order of rows, the first of one row.
    """

    def __init__(self, measured: Sequence[tuple[int, float]]) -> None:
        self._rows = [rows for rows, _ in measured]
        self._seconds = [seconds for _, seconds in measured]
        assert self._rows[0] == 1

    def seconds(self, num_rows: int) -> float:
        """Return the expected seconds of a pass; 0 without rows."""
        if not num_rows:
            return 0.0
        place, share = self._place(num_rows)
        low = self._seconds[place]
        if not share:
            return low * max(1.0, num_rows / self._rows[-1])
        return low + share * (self._seconds[place + 1] - low)

    def most_rows(self, within_s: float, at_most: int) -> int:
        """Return the rows of the largest pass within `within_s`, up to `at_most`; 0 for none."""
        return bisect_right(range(1, at_most + 1), within_s, key=self.seconds)

    def observe(self, num_rows: int, seconds: float) -> None:
        """Record the seconds of a pass."""
        residual = seconds / self.seconds(num_rows) - 1.0
        change = _RATE * max(-_MOST_SURPRISING, min(_MOST_SURPRISING, residual))
        place, share = self._place(num_rows)
        self._seconds[place] *= 1.0 + (1.0 - share) * change
        if share:
            self._seconds[place + 1] *= 1.0 + share * change

    def _place(self, num_rows: int) -> tuple[int, float]:
        """Return the last measured number up to `num_rows`, by index, and the share beyond it."""
        place = bisect_right(self._rows, num_rows) - 1
        if place + 1 == len(self._rows):
            return place, 0.0
        low, high = self._rows[place], self._rows[place + 1]
        return place, (num_rows - low) / (high - low)
