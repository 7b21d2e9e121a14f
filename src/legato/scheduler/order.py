"""Who goes first: ranks of requests among those of their tenant, and turns of best-effort ones.

A rank is a time in seconds, lower first. Each order shifts a request's arrival by a bounded delay
or head start, so no request starves: once a request has waited as long as its shift exceeds that of
a new request, no new request goes before it, under any load. Priority shifts the rank too, by a
bounded time.

Earliest deadline first is the best order while all deadlines can be met, and the worst beyond that:
it serves the requests that are about to be late, so all become late, and milliseconds decide which
do not. So under `edf` late requests wait apart, as in Robust EDF's reject queue (Buttazzo and
Stankovic, 1993), and one step in `LATE_TURN` begins with them.
"""

import math
from collections.abc import Callable, Iterable

from legato.core.config import PrefillOrder
from legato.core.request import Request
from legato.core.slo import SloClass

Order = Callable[[Request], float]
Rank = tuple[int, float]

PRIORITY_STEP_S = 10.0
"""One step of priority outweighs an arrival this much earlier."""

LATE_TURN = 4
"""One in this many steps with a tenant's prompts begins with its late ones."""

_S_PER_TOKEN = 0.005
"""Waiting time that outweighs one more token to compute."""

_NO_DEADLINE_S = 60.0

PREEMPTED, TIMELY, LATE = -1, 0, 1


def fcfs(request: Request) -> float:
    """First come, first served."""
    return request.message.arrival_time_s


def srf(request: Request) -> float:
    """Shortest remaining first, with ageing."""
    return request.message.arrival_time_s + _S_PER_TOKEN * request.num_missing_tokens


def lpm(request: Request) -> float:
    """Longest prefix match: the time that a cached token saves counts as waiting time.

    So requests with a common prefix go one after the other while it is in the cache (Zheng et al.,
    SGLang, NeurIPS 2024, which sorts by the length alone).
    """
    return request.message.arrival_time_s - _S_PER_TOKEN * request.num_hit_tokens


def edf(request: Request) -> float:
    """Earliest deadline first over TTFT deadlines (Liu and Layland, 1973)."""
    ttft_s = request.slo.ttft_s
    return request.message.arrival_time_s + (_NO_DEADLINE_S if ttft_s is None else ttft_s)


ORDERS: dict[PrefillOrder, Order] = {"fcfs": fcfs, "srf": srf, "edf": edf, "lpm": lpm}

HIT_AWARE: frozenset[PrefillOrder] = frozenset(("srf", "lpm"))
"""Orders in which a rank depends on the contents of the cache."""


def rank(request: Request, order: Order, *, gives_up: bool = True) -> Rank:
    """Return the whole sort key.

    Preempted requests go before all others: their streams stand still.

    Args:
        gives_up: whether late requests wait for timely ones. With load shedding, late requests are
            few, and are owed the promise of their admission.
    """
    priority_s = PRIORITY_STEP_S * request.message.service.priority
    group = TIMELY
    if request.num_preemptions:
        group = PREEMPTED
    elif gives_up and request.is_late and order is edf:
        group = LATE
    return group, order(request) + priority_s


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
