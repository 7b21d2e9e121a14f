"""How much longer than predicted a step is allowed for, so that a promise is kept."""

from legato.scheduler.recent_quantile import RecentQuantile

_AIMED_AT = 0.1
"""Of the share of gaps that a promise lets be late. A request has hardly more gaps beside a prompt
than let a single one be late: so nine in ten of such requests have none."""
_LEAST_STEPS, _MOST_STEPS = 100, 10_000
_UNKNOWN, _TELLING = 0.6, 0.5
"""What an interruption was seen to take, and from what part of the steps on, that the quantile is
told from, a machine that is interrupted has shown it. Until then one is taken to be among them."""
_SPARE = 0.03
"""The largest error to come is a little larger than the largest of those that are known."""
_LEAST, _MOST = 0.02, 1.0
"""No margin covers steps that took even longer than the largest: they are not counted."""
_WIDENING, _MOST_EXTRA = 0.1, 0.5
"""What a step beyond the margin adds to it, and what such steps may add together."""


class Margin:
    """Follows the errors of steps as they were delivered: conformal PI control.

    An error is by how much longer a step took, as a share of the prediction of one that it would
    make late. The margin is a quantile of the
    last ones, and an integral of misses on top: an error beyond the margin widens it at once, all
    others give that back bit by bit, so that in the long run no more are beyond it than are aimed
    at, whatever the errors are like (Angelopoulos, Candès and Tibshirani, "Conformal PID control
    for time series prediction", NeurIPS 2023).

    Args:
        quantile: of a request's gaps, that are promised to be in time.

    Attributes:
        value: share of its prediction that a step is allowed to take longer.
    """

    def __init__(self, quantile: float = 0.99) -> None:
        self._extra = 0.0
        self._errors = RecentQuantile(_LEAST_STEPS, 0.0)
        self.promise(quantile)

    def promise(self, quantile: float) -> None:
        """Aim at another quantile; what is known of the errors stays so."""
        self._missed = _AIMED_AT * (1.0 - quantile)
        window = max(_LEAST_STEPS, min(_MOST_STEPS, round(1.0 / self._missed)))
        self._errors = RecentQuantile(window, 1.0 - self._missed, self._errors)
        self._update()

    def observe(self, error: float) -> None:
        """A step with prefill beside decodes has been delivered."""
        if error > _MOST:
            self.expire()
            return
        is_beyond = error > self.value
        self._extra += _WIDENING * (is_beyond - self._missed)
        self._extra = min(_MOST_EXTRA, max(0.0, self._extra))
        self._errors.add(error)
        self._update()

    def expire(self) -> None:
        """Forget a little: a margin that keeps prefill out of all steps would never be observed."""
        self._extra = max(0.0, self._extra - _WIDENING * self._missed)
        self._errors.add(None)
        self._update()

    def _update(self) -> None:
        largest = self._errors.value if len(self._errors) else 0.0
        least = _LEAST if self._errors.fullness >= _TELLING else _UNKNOWN
        self.value = min(_MOST, max(least, largest + _SPARE) + self._extra)
