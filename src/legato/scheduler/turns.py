"""Best-effort requests must not starve beside those with a promise, nor hold them up for long."""

import math
from collections.abc import Iterable

from legato.core.request import Request
from legato.core.slo import SloClass

_TURN = 10
_LONGEST_HOLD_S, _SHARE_OF_TTFT = 0.5, 0.25
"""How long requests with a promise wait at a time for a best-effort one to find room, and the share
of the shortest TTFT promise that this may be."""
_SHARE = 0.1
"""Share of the time in which they wait."""
_PATIENCE_S = 300.0
"""After so long, they wait twice as long each time, until it has found room."""


class PrefillTurns:
    """Offers every tenth prefill chunk to best-effort requests first.

    One that finds no room in its turn is tried first in each step. The others pass it, but for a
    tenth of the time, in which all that comes free is left to it.
    """

    def __init__(self) -> None:
        self._num_promised = 0
        self._hold_s = _LONGEST_HOLD_S

    def promise(self, classes: Iterable[SloClass]) -> None:
        """Hold up requests of these classes for no longer than their promises bear."""
        ttfts_s = [slo.ttft_s for slo in classes if slo.ttft_s is not None]
        self._hold_s = min([_LONGEST_HOLD_S, *[_SHARE_OF_TTFT * ttft_s for ttft_s in ttfts_s]])

    @property
    def is_best_efforts(self) -> bool:
        return self._num_promised >= _TURN - 1

    def served(self, *, best_effort: bool) -> None:
        """A prefill chunk was scheduled."""
        self._num_promised = 0 if best_effort else self._num_promised + 1

    def may_pass(self, request: Request, now_s: float) -> bool:
        """Whether others are admitted before a best-effort request that found no room just now."""
        if request.passed_since_s is None:
            request.passed_since_s = now_s
        periods = (now_s - request.passed_since_s) / (self._hold_s / _SHARE)
        over = periods - _PATIENCE_S / (self._hold_s / _SHARE)
        if over > 0.0:
            # Periods of 2, 4, 8 ... times the length: where in the present one it is.
            begun = 2.0 ** math.floor(math.log2(over / 2.0 + 1.0)) * 2.0 - 2.0
            periods = (over - begun) / (begun + 2.0)
        return periods % 1.0 < 1.0 - _SHARE
