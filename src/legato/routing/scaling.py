"""How many replicas keep the promises, for fleets and simulators alike.

Load is counted in promises. A replica's strain is the share of what it promised that it expects to
use up, for first tokens or between tokens, whichever is more; at 1 the next request may be late.
"""

import math
from collections.abc import Iterable, Sequence

from legato.core.replica_state import ReplicaState
from legato.core.slo import SloClass
from legato.routing.request import Role

SOONER_S, SLOWER_S = 10.0, 300.0
"""For how long more replicas are wanted, or fewer, before there are; by default."""

_MOST, _TARGET = 0.8, 0.6
"""More replicas are started beyond the first; so many that the second is reached."""
_FEWER = 0.5
"""One is ended where those that are left would stay below."""
_UNPROMISED_WAITING = 8
"""Where nothing is promised, so many requests that wait strain a replica as much as a promise that
is about to be broken."""


def strain(state: ReplicaState, classes: Iterable[SloClass], role: Role = "both") -> float:
    """Of one replica, which is at least 0.

    One that only prefills promises nothing of gaps between tokens, which others send.
    """
    shares: list[float] = []
    for slo in classes:
        if slo.ttft_s is not None:
            shares.append(state.delay_s / slo.ttft_s)
        if slo.step_s is not None and role != "prefill":
            shares.append(state.itl_s / slo.step_s)
    return max(shares) if shares else state.num_waiting / _UNPROMISED_WAITING


def wanted_replicas(strains: Sequence[float]) -> int:
    """How many replicas there should be, where those that there are are strained so much."""
    num_replicas = len(strains)
    if not strains:
        return 0
    mean = sum(strains) / num_replicas
    if mean > _MOST:
        return max(num_replicas + 1, math.ceil(mean / _TARGET * num_replicas))
    if num_replicas > 1 and mean * num_replicas / (num_replicas - 1) < _FEWER:
        return num_replicas - 1
    return num_replicas
