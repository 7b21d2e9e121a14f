"""Orders of prefill: the rank of a request among the requests of its tenant.

A rank is a time in seconds, lower first. Each order shifts a request's arrival by a bounded delay
or head start, so no request starves: once a request has waited as long as its shift exceeds that of
a new request, no new request goes before it, under any load. Priority shifts the rank too, by a
bounded time.

Earliest deadline first is the best order while all deadlines can be met, and the worst beyond that:
it serves the requests that are about to be late, so all become late, and milliseconds decide which
do not. So under `edf` late requests wait apart, as in Robust EDF's reject queue (Buttazzo and
Stankovic, 1993), and one step in `LATE_TURN` begins with them.
"""

from collections.abc import Callable

from legato.core.config import PrefillOrder
from legato.core.request import Request

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
