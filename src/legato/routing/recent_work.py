"""Measures the recent work of all replicas of a role together."""

import math

_MEMORY_S = 30.0
"""Work of so many seconds ago counts for 1/e."""
_LEAST_S = 1.0
"""Rates assume at least so many seconds of observation."""


class RecentWork:
    """Decaying sums of requests and their compute time. Time is an argument and never decreases."""

    def __init__(self) -> None:
        self._num_requests = self._work_s = 0.0
        self._start_s: float | None = None
        self._at_s = 0.0

    def add(self, work_s: float, now_s: float) -> None:
        """Add a request, with the compute time of its prompt at its replica."""
        self._advance(now_s)
        self._num_requests += 1.0
        self._work_s += work_s

    def requests_per_s(self, now_s: float) -> float:
        self._advance(now_s)
        return self._num_requests / self._seconds

    def busy(self, now_s: float) -> float:
        """Return how many replicas this work would have kept fully busy."""
        self._advance(now_s)
        return self._work_s / self._seconds

    @property
    def _seconds(self) -> float:
        """Seconds of observation, weighted like the work: old seconds count less."""
        assert self._start_s is not None
        watched_s = max(_LEAST_S, self._at_s - self._start_s)
        return _MEMORY_S * -math.expm1(-watched_s / _MEMORY_S)

    def _advance(self, now_s: float) -> None:
        if self._start_s is None:
            self._start_s = self._at_s = now_s
        left = math.exp((self._at_s - now_s) / _MEMORY_S)
        self._num_requests *= left
        self._work_s *= left
        self._at_s = now_s
