"""Who gets the prefill tokens: the rank of a request among those of its tenant.

A rank is a time in seconds, lower first. Each order adds to a request's arrival a delay, or takes
a head start from it, that is bounded, so nobody starves: once a request has waited as long as its
own rank lies behind that of one which arrives now, nobody who arrives from then on goes before it,
whatever the load, unless by priority, which moves the rank by a bounded time too.

Earliest deadline first is the best order as long as all deadlines can be met, and the worst beyond
that: it serves who is about to be late, so that all are, and milliseconds decide who is not. So
under `edf` the late wait apart, as in Robust EDF's reject queue (Buttazzo and Stankovic, 1993), and
one step in `LATE_TURN` begins with them.
"""

from collections.abc import Callable

from legato.core.config import PrefillOrder
from legato.core.request import Request

Order = Callable[[Request], float]
Rank = tuple[int, float]

PRIORITY_STEP_S = 10.0
"""One step of priority goes before what arrived this much earlier."""

LATE_TURN = 4
"""Of as many steps that compute a tenant's prompts, one begins with those that are late."""

_S_PER_TOKEN = 0.005
"""How much waiting makes up for one token more to compute."""

_NO_DEADLINE_S = 60.0

PREEMPTED, TIMELY, LATE = -1, 0, 1


def fcfs(request: Request) -> float:
    """First come, first served."""
    return request.message.arrival_time_s


def srf(request: Request) -> float:
    """Shortest remaining first, with ageing."""
    return request.message.arrival_time_s + _S_PER_TOKEN * request.num_missing_tokens


def lpm(request: Request) -> float:
    """Longest prefix match: what a cached token saves counts as having waited that long.

    Requests with a common prefix so come one after the other, while it is in the cache (Zheng et
    al., SGLang, NeurIPS 2024, which sorts by the length alone).
    """
    return request.message.arrival_time_s - _S_PER_TOKEN * request.num_hit_tokens


def edf(request: Request) -> float:
    """Earliest deadline first over TTFT deadlines (Liu and Layland, 1973)."""
    ttft_s = request.slo.ttft_s
    return request.message.arrival_time_s + (_NO_DEADLINE_S if ttft_s is None else ttft_s)


ORDERS: dict[PrefillOrder, Order] = {"fcfs": fcfs, "srf": srf, "edf": edf, "lpm": lpm}

HIT_AWARE: frozenset[PrefillOrder] = frozenset(("srf", "lpm"))
"""Orders in which a rank depends on what is in the cache."""


def rank(request: Request, order: Order, *, gives_up: bool = True) -> Rank:
    """The whole sort key: preempted requests, whose streams stand still, before all others.

    Args:
        gives_up: whether the late may have to wait for the timely. Where load is shed they are few,
            and what they were promised when they were admitted is owed to them.
    """
    priority_s = PRIORITY_STEP_S * request.message.service.priority
    group = TIMELY
    if request.num_preemptions:
        group = PREEMPTED
    elif gives_up and request.is_late and order is edf:
        group = LATE
    return group, order(request) + priority_s
