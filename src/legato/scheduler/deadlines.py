"""Where in its limit a step's deadline is, for executors that drop rows to keep it."""

from legato.scheduler.recent_quantile import RecentQuantile

_STEPS, _IN_TIME = 256, 0.99
"""The guard covers this quantile of what the last so many steps took after their last look. Bursts
of requests, which keep the processes in front of the engine busy, hit one step of a hundred."""
_FEW_STEPS, _FIRST_GUARD = 16, 0.05
"""With fewer steps, the guard is this share of the limit."""
_LEAST_GUARD, _LARGEST_GUARD = 0.02, 0.25
"""Shares of the limit. Less would leave no time for the way to the clients, which is not measured;
more would drop rows of steps that are in time."""
_DROPPED = 0.02
"""Share of prefill rows that steps may drop in the long run. They are computed again."""
_LONGEST_LATE = 1.5
"""Steps that took more than this multiple of their limit do not count: shorter ones would be late,
too."""
_PER_DROPPED, _PER_LATE, _MOST_SHORTENING = 0.1, 0.03, 0.5
"""How much a shortening rises with a step that drops all rows, and with a late one; its bound."""


class Deadlines:
    """Learns the guard before a step's limit, and how much shorter steps are to be planned.

    After an executor's last look at the clock come a few layers, the sampling and the delivery of
    the tokens. The guard is a high quantile of what all that took beyond what was foreseen then,
    interruptions included.

    A step that drops rows, or is late, was planned too long. A shortening for each rises then, and
    falls while all is well, so that few rows are computed in vain and few steps are late in the
    long run on any machine (adaptive conformal inference: Gibbs and Candès, NeurIPS 2021).
    """

    def __init__(self) -> None:
        self._unforeseen_s = RecentQuantile(_STEPS, _IN_TIME)
        self._late = 0.0
        self._dropped_shortening = self._late_shortening = 0.0

    @property
    def shortening(self) -> float:
        """Share by which steps that may drop rows are planned to be shorter."""
        return max(self._dropped_shortening, self._late_shortening)

    def set_miss_rate(self, late: float) -> None:
        """Set the chance of a late step that a margin would aim at."""
        self._late = late

    def guard_s(self, limit_s: float) -> float:
        """Return how long before its limit a step's layers must end."""
        if len(self._unforeseen_s) < _FEW_STEPS:
            return _FIRST_GUARD * limit_s
        guard_s = max(_LEAST_GUARD * limit_s, self._unforeseen_s.value)
        return min(guard_s, _LARGEST_GUARD * limit_s)

    def observe(
        self, delivered_s: float, limit_s: float, foreseen_s: float | None, dropped: float
    ) -> None:
        """Record a step that had a deadline.

        Args:
            foreseen_s: as in `StepResult`.
            dropped: share of its prefill rows that were dropped.
        """
        if foreseen_s is not None:
            self._unforeseen_s.add(delivered_s - foreseen_s)
        is_late = limit_s < delivered_s <= _LONGEST_LATE * limit_s
        self._adjust_shortening(dropped, float(is_late))

    def expire(self) -> None:
        """Forget a little: a shortening that keeps prefill out of all steps observes nothing."""
        self._adjust_shortening(0.0, 0.0)

    def _adjust_shortening(self, dropped: float, late: float) -> None:
        for_dropped = self._dropped_shortening + _PER_DROPPED * (dropped - _DROPPED)
        for_late = self._late_shortening + _PER_LATE * (late - self._late)
        self._dropped_shortening = min(max(0.0, for_dropped), _MOST_SHORTENING)
        self._late_shortening = min(max(0.0, for_late), _MOST_SHORTENING)
