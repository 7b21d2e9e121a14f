"""Turns for best-effort requests: they neither starve nor delay promised requests for long."""

import math
from collections.abc import Iterable

from legato.core.request import Request
from legato.core.slo import SloClass

_TURN = 10
_LONGEST_HOLD_S, _SHARE_OF_TTFT = 0.5, 0.25
"""Longest time that promised requests wait for a best-effort one to find room, and its bound as a
share of the shortest TTFT promise."""
_SHARE = 0.1
"""Share of the time in which promised requests wait so."""
_PATIENCE_S = 300.0
"""Time after which the wait doubles each time, until the best-effort request has found room."""


class PrefillTurns:
    """Offers every tenth prefill chunk to best-effort requests first.

    A best-effort request that finds no room in its turn is tried first in each step. Other requests
    pass it, except in a tenth of the time, which leaves all free room to it.
    """

    def __init__(self) -> None:
        self._num_promised = 0
        self._hold_s = _LONGEST_HOLD_S

    def promise(self, classes: Iterable[SloClass]) -> None:
        """Bound the wait by the TTFT promises of these classes."""
        ttfts_s = [slo.ttft_s for slo in classes if slo.ttft_s is not None]
        self._hold_s = min([_LONGEST_HOLD_S, *[_SHARE_OF_TTFT * ttft_s for ttft_s in ttfts_s]])

    @property
    def is_best_effort_turn(self) -> bool:
        return self._num_promised >= _TURN - 1

    def served(self, *, best_effort: bool) -> None:
        """Record a scheduled prefill chunk."""
        self._num_promised = 0 if best_effort else self._num_promised + 1

    def may_pass(self, request: Request, now_s: float) -> bool:
        """Whether other requests are admitted before a best-effort one that found no room."""
        if request.passed_since_s is None:
            request.passed_since_s = now_s
        periods = (now_s - request.passed_since_s) / (self._hold_s / _SHARE)
        over = periods - _PATIENCE_S / (self._hold_s / _SHARE)
        if over > 0.0:
            # Periods of 2, 4, 8 ... times the length: the position within the present one.
            begun = 2.0 ** math.floor(math.log2(over / 2.0 + 1.0)) * 2.0 - 2.0
            periods = (over - begun) / (begun + 2.0)
        return periods % 1.0 < 1.0 - _SHARE
