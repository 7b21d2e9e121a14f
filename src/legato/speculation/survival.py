"""How likely drafts are to be right, learned from those that were and were not."""

from collections.abc import Sequence

_MEMORY = 0.998
"""What a trial counts for after one more of its kind: half after 350."""
_PRIOR_TRIALS = 4.0
"""Weight of what is believed before there are trials."""
_REQUEST_MEMORY = 0.9
"""What a trial of a request counts for after one more: half after 7."""
_REQUEST_TRIALS = 3.0
"""Weight of a request being like all others."""
_MOST = 0.99
_RECOVERY = 0.995
"""What trials count for after a step without one: half after 140. What is guessed badly is tried
again some day."""


class Rates:
    """Shares of guesses that were right, by kinds that are ordered by how likely they are.

    Args:
        priors: what is believed of each kind before there are trials.
    """

    def __init__(self, priors: Sequence[float]) -> None:
        self._priors = tuple(priors)
        self._right = [_PRIOR_TRIALS * prior for prior in priors]
        self._tried = [_PRIOR_TRIALS] * len(priors)

    def __getitem__(self, kind: int) -> float:
        return self._right[kind] / self._tried[kind]

    def observe(self, kind: int, *, is_right: bool) -> None:
        self._right[kind] = _MEMORY * self._right[kind] + is_right
        self._tried[kind] = _MEMORY * self._tried[kind] + 1.0

    def recover(self) -> None:
        """A step went by without a guess of any kind, where guesses were not worth their time."""
        for kind, prior in enumerate(self._priors):
            right, tried = _PRIOR_TRIALS * prior, _PRIOR_TRIALS
            self._right[kind] = right + _RECOVERY * (self._right[kind] - right)
            self._tried[kind] = tried + _RECOVERY * (self._tried[kind] - tried)


class Luck:
    """How much better or worse than others a request's guesses fare.

    What was right is held against what was expected, so that it does not matter which kinds of
    guesses the request had.
    """

    __slots__ = ("_expected", "_right")

    def __init__(self) -> None:
        self._right = self._expected = _REQUEST_TRIALS

    def chance(self, rate: float) -> float:
        """Of a guess of the request, where it is `rate` for all requests."""
        return min(_MOST, rate * self._right / self._expected)

    def observe(self, rate: float, *, is_right: bool) -> None:
        self._fade(_REQUEST_MEMORY)
        self._right += is_right
        self._expected += rate

    def recover(self) -> None:
        """A step went by without a trial."""
        self._fade(_RECOVERY)

    def _fade(self, kept: float) -> None:
        self._right = _REQUEST_TRIALS + kept * (self._right - _REQUEST_TRIALS)
        self._expected = _REQUEST_TRIALS + kept * (self._expected - _REQUEST_TRIALS)
