"""How much there was to do lately, for all replicas of a role together."""

import math

_MEMORY_S = 30.0
"""What came so long ago counts for 1/e."""
_LEAST_S = 1.0
"""As if it had been watched for so long at least."""


class RecentWork:
    """Requests and what they took to compute, by time, which is an argument and never descends."""

    def __init__(self) -> None:
        self._num_requests = self._work_s = 0.0
        self._start_s: float | None = None
        self._at_s = 0.0

    def add(self, work_s: float, now_s: float) -> None:
        """A request more, whose prompt takes so long where it was sent."""
        self._advance(now_s)
        self._num_requests += 1.0
        self._work_s += work_s

    def requests_per_s(self, now_s: float) -> float:
        self._advance(now_s)
        return self._num_requests / self._seconds

    def busy(self, now_s: float) -> float:
        """How many replicas would have been busy with it all the time."""
        self._advance(now_s)
        return self._work_s / self._seconds

    @property
    def _seconds(self) -> float:
        """Over which it was counted; those long ago for as little as what came then."""
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
