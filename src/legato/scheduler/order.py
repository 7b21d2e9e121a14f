"""Who goes first among the requests of one tenant: ranks, in seconds, lower first.

A rank shifts a request's arrival by a bounded time, so no request starves: once a request has
waited as long as its shift exceeds that of a new request, no new request goes before it, under any
load. Priority shifts the rank too, by a bounded time.

The default is a deadline for each prompt: the time at which its first token would come five times
later than alone. So a short prompt passes a long one, but not for longer than that takes to age. A
TTFT promise is a deadline, too.

Earliest deadline first is the best order while all deadlines can be met, and the worst beyond that:
it serves the requests that are about to be late, so all become late, and milliseconds decide which
do not. So requests that are late wait apart, as in Robust EDF's reject queue (Buttazzo and
Stankovic, 1993), and get a part of their tenant's prefill.
"""

from collections.abc import Callable

from legato.core.config import PrefillOrder
from legato.core.request import Request

Order = Callable[[Request, float], float]
"""Takes a request and the seconds that the rest of its prompt takes alone."""

Rank = tuple[int, float]

PRIORITY_STEP_S = 10.0
"""One step of priority outweighs an arrival this much earlier."""

LATE_SHARE = 0.25
"""Share of a tenant's prefill that its late prompts get while others wait, in seconds."""

_MOST_SLOWDOWN = 5.0
"""The slowdown at which a prompt is due. A smaller one is nearer to first come, first served; a
larger one to the shortest first."""

_S_PER_TOKEN = 0.005
"""Waiting time that a cached token outweighs."""

NO_DEADLINE_S = 60.0
"""When a prompt without a TTFT promise is due among prompts with one."""

PREEMPTED, TIMELY, LATE = -1, 0, 1


def slowdown(request: Request, alone_s: float) -> float:
    """When the slowdown of the first token becomes the largest that is wanted, or its deadline."""
    due_s = _MOST_SLOWDOWN * alone_s
    ttft_s = request.slo.ttft_s
    return request.message.arrival_time_s + (due_s if ttft_s is None else min(due_s, ttft_s))


def fcfs(request: Request, alone_s: float) -> float:  # noqa: ARG001
    """First come, first served."""
    return request.message.arrival_time_s


def lpm(request: Request, alone_s: float) -> float:  # noqa: ARG001
    """Longest prefix match: the time that a cached token saves counts as waiting time.

    So requests with a common prefix go one after the other while it is in the cache (Zheng et al.,
    SGLang, NeurIPS 2024, which sorts by the length alone).
    """
    return request.message.arrival_time_s - _S_PER_TOKEN * request.num_hit_tokens


def edf(request: Request, alone_s: float = 0.0) -> float:  # noqa: ARG001
    """Earliest deadline first over TTFT deadlines (Liu and Layland, 1973)."""
    ttft_s = request.slo.ttft_s
    return request.message.arrival_time_s + (NO_DEADLINE_S if ttft_s is None else ttft_s)


ORDERS: dict[PrefillOrder, Order] = {
    "slowdown": slowdown,
    "fcfs": fcfs,
    "edf": edf,
    "lpm": lpm,
}

HIT_AWARE: frozenset[PrefillOrder] = frozenset(("slowdown", "lpm"))
"""Orders in which a rank depends on the contents of the cache."""

_SETS_LATE_APART = (edf, slowdown)


def rank(request: Request, order: Order, alone_s: float, *, gives_up: bool = True) -> Rank:
    """Return the whole sort key.

    Preempted requests go before all others of their tenant: their streams stand still.

    Args:
        gives_up: whether late requests wait for timely ones. With load shedding, late requests are
            few, and are owed the promise of their admission.
    """
    priority_s = PRIORITY_STEP_S * request.message.service.priority
    group = TIMELY
    if request.num_preemptions:
        group = PREEMPTED
    elif gives_up and request.is_late and order in _SETS_LATE_APART:
        group = LATE
    return group, order(request, alone_s) + priority_s
