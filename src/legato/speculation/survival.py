"""Chances of drafts to be right, learned from earlier drafts."""

from bisect import bisect_right
from collections.abc import Sequence

_MEMORY = 0.998
"""Weight that a trial keeps after one more of its kind: half after 350."""
_PRIOR_TRIALS = 4.0
"""Weight of the prior, in trials."""
_REQUEST_MEMORY = 0.9
"""Weight that a trial of a request keeps after one more: half after 7."""
_REQUEST_TRIALS = 3.0
"""Weight, in trials, of the assumption that a request is like all others."""
_MOST = 0.99
_LEVELS = (0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96)
"""Bounds of the chances between which guesses look equally good."""
_RECOVERY = 0.995
"""Weight that trials keep after a step without one: half after 140. So a bad kind of guess is tried
again some day."""


class Rates:
    """Shares of right guesses by kind; kinds are in order of likelihood.

    Args:
        priors: share assumed of each kind before there are trials.
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
        """Fade the trials after a step without guesses because they were not worth their time."""
        for kind, prior in enumerate(self._priors):
            right, tried = _PRIOR_TRIALS * prior, _PRIOR_TRIALS
            self._right[kind] = right + _RECOVERY * (self._right[kind] - right)
            self._tried[kind] = tried + _RECOVERY * (self._tried[kind] - tried)


class Luck:
    """Ratio of right guesses to expected ones.

    Since right guesses are compared with expected ones, the guesses' kinds do not matter.

    Args:
        memory: weight that a trial keeps after one more.
        trials: weight, in trials, of a ratio of 1.
    """

    __slots__ = ("_expected", "_memory", "_right", "_trials")

    def __init__(self, memory: float = _REQUEST_MEMORY, trials: float = _REQUEST_TRIALS) -> None:
        self._memory, self._trials = memory, trials
        self._right = self._expected = trials

    def chance(self, rate: float) -> float:
        """Return the chance of such a guess, which would otherwise be `rate`."""
        return min(_MOST, rate * self._right / self._expected)

    def observe(self, rate: float, *, is_right: bool) -> None:
        self._fade(self._memory)
        self._right += is_right
        self._expected += rate

    def recover(self) -> None:
        """Fade the trials after a step without one."""
        self._fade(_RECOVERY)

    def _fade(self, kept: float) -> None:
        self._right = self._trials + kept * (self._right - self._trials)
        self._expected = self._trials + kept * (self._expected - self._trials)


class Beliefs:
    """Chances of guesses by kind, by the request's luck, and by a correction of their product.

    Drafts are chosen by chance, and the best-looking ones are above all overrated ones. So a chance
    is corrected by the results of guesses that looked as good, chosen or not.

    Args:
        priors: as in `Rates`.
    """

    def __init__(self, priors: Sequence[float]) -> None:
        self._rates = Rates(priors)
        self._corrections = [Luck(_MEMORY, _PRIOR_TRIALS) for _ in range(len(_LEVELS) + 1)]

    def chance(self, kind: int, luck: Luck) -> float:
        believed = luck.chance(self._rates[kind])
        return self._corrections[bisect_right(_LEVELS, believed)].chance(believed)

    def observe(self, kind: int, luck: Luck, *, is_right: bool) -> None:
        rate = self._rates[kind]
        believed = luck.chance(rate)
        correction = self._corrections[bisect_right(_LEVELS, believed)]
        correction.observe(believed, is_right=is_right)
        luck.observe(rate, is_right=is_right)
        self._rates.observe(kind, is_right=is_right)
