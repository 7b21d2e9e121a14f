"""Who gets the prefill tokens: the rank of a request among those that wait for prefill.

A rank is a time in seconds, lower first. Each order adds to a request's arrival a delay, or takes
a head start from it, that is bounded, so nobody starves: once a request has waited as long as its
own rank lies behind that of one which arrives now, nobody who arrives from then on goes before it,
whatever the load, unless by priority, which moves the rank by a bounded time too.
"""

from collections.abc import Callable

from legato.core.config import PrefillOrder
from legato.core.request import Request

Order = Callable[[Request, bool], float]
"""Takes the request, and whether its TTFT SLO is out of reach."""

PRIORITY_STEP_S = 10.0
"""One step of priority goes before what arrived this much earlier."""

_S_PER_TOKEN = 0.005
"""How much waiting makes up for one token more to compute."""

_NO_DEADLINE_S = 60.0


def fcfs(request: Request, is_late: bool) -> float:  # noqa: ARG001
    """First come, first served."""
    return request.message.arrival_time_s


def srf(request: Request, is_late: bool) -> float:  # noqa: ARG001
    """Shortest remaining first, with ageing."""
    return request.message.arrival_time_s + _S_PER_TOKEN * request.num_missing_tokens


def lpm(request: Request, is_late: bool) -> float:  # noqa: ARG001
    """Longest prefix match: what a cached token saves counts as having waited that long.

    Requests with a common prefix so come one after the other, while it is in the cache (Zheng et
    al., SGLang, NeurIPS 2024, which sorts by the length alone).
    """
    return request.message.arrival_time_s - _S_PER_TOKEN * request.num_hit_tokens


def edf(request: Request, is_late: bool) -> float:
    """Earliest deadline first over TTFT deadlines (Liu and Layland, 1973).

    A request that has missed its deadline would take others down with it, so it goes behind those
    that wait, but before those of its class that come from then on.
    """
    ttft_s = request.slo.ttft_s
    if ttft_s is None:
        return request.message.arrival_time_s + _NO_DEADLINE_S
    return request.message.arrival_time_s + ttft_s * (1.0 + is_late)


ORDERS: dict[PrefillOrder, Order] = {"fcfs": fcfs, "srf": srf, "edf": edf, "lpm": lpm}

HIT_AWARE: frozenset[PrefillOrder] = frozenset(("srf", "lpm"))
"""Orders in which a rank depends on what is in the cache."""


def is_past_deadline(request: Request, now_s: float) -> bool:
    """Whether its TTFT SLO is missed, and that was not known yet."""
    deadline_s = request.ttft_deadline_s
    return not request.is_late and deadline_s is not None and deadline_s < now_s


def rank(request: Request, order: Order) -> tuple[float, float]:
    """The whole sort key: preempted requests, whose streams stand still, go before all others."""
    return _rank(request, order, request.is_late)


def late_rank(request: Request, order: Order) -> tuple[float, float]:
    """What `rank` comes to be when the request misses its deadline."""
    return _rank(request, order, True)


def _rank(request: Request, order: Order, is_late: bool) -> tuple[float, float]:
    stands_still = -float(request.num_preemptions > 0)
    priority_s = PRIORITY_STEP_S * request.message.service.priority
    return stands_still, order(request, is_late) + priority_s
