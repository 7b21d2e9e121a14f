"""The margin on predicted step times that keeps a promise."""

from legato.scheduler.recent_quantile import RecentQuantile

_AIMED_AT = 0.1
"""The margin aims at this share of the late gaps that a promise allows. A request has hardly more
gaps beside prompts than allow it one late gap, so nine in ten such requests have none."""
_LEAST_STEPS, _MOST_STEPS = 100, 10_000
_UNKNOWN, _TELLING = 0.6, 0.5
"""Least margin until the quantile's window is full to the second share: the length of an
interruption that was measured. A machine with interruptions has shown one by then."""
_SPARE = 0.03
"""Added to the quantile: the largest future error is a little larger than the largest known one."""
_LEAST, _MOST = 0.02, 1.0
"""Bounds of the margin. Steps with an error above the upper bound are not counted."""
_WIDENING, _MOST_EXTRA = 0.1, 0.5
"""Addition to the margin by a step beyond it, and the most that such steps add together."""


class Margin:
    """Follows the errors of delivered steps by conformal PI control.

    An error is a step's extra time, as a share of the prediction of a step that it would make late.
    The margin is a quantile of the last errors plus an integral of misses: an error beyond the
    margin widens it at once, and every other error narrows it a little. So in the long run no more
    errors are beyond it than the target, whatever their distribution (Angelopoulos, Candès and
    Tibshirani, "Conformal PID control for time series prediction", NeurIPS 2023).

    Args:
        quantile: share of a request's gaps that are promised to be in time.

    Attributes:
        value: share by which a step may exceed its prediction.
    """

    def __init__(self, quantile: float = 0.99) -> None:
        self._extra = 0.0
        self._errors = RecentQuantile(_LEAST_STEPS, 0.0)
        self.promise(quantile)

    def promise(self, quantile: float) -> None:
        """Aim at another quantile; keep the known errors."""
        self._missed = _AIMED_AT * (1.0 - quantile)
        window = max(_LEAST_STEPS, min(_MOST_STEPS, round(1.0 / self._missed)))
        self._errors = RecentQuantile(window, 1.0 - self._missed, self._errors)
        self._update()

    def observe(self, error: float) -> None:
        """Record the error of a delivered step with prefill beside decodes."""
        if error > _MOST:
            self.expire()
            return
        is_beyond = error > self.value
        self._extra += _WIDENING * (is_beyond - self._missed)
        self._extra = min(_MOST_EXTRA, max(0.0, self._extra))
        self._errors.add(error)
        self._update()

    def expire(self) -> None:
        """Forget a little.

        A margin that keeps prefill out of all steps observes no errors, so it would never shrink.
        """
        self._extra = max(0.0, self._extra - _WIDENING * self._missed)
        self._errors.add(None)
        self._update()

    def _update(self) -> None:
        largest = self._errors.value if len(self._errors) else 0.0
        least = _LEAST if self._errors.fullness >= _TELLING else _UNKNOWN
        self.value = min(_MOST, max(least, largest + _SPARE) + self._extra)
