"""Decides how many replicas keep the promises, for fleets and simulators alike.

Load is measured in promises. A replica's strain is the share of its promised time that it expects
to use, for first tokens or between tokens, whichever is larger; at 1, the next request may be late.
"""

import math
from collections.abc import Iterable, Sequence

from legato.core.replica_state import ReplicaState
from legato.core.slo import SloClass
from legato_fleet.routing.request import Role

SOONER_S, SLOWER_S = 10.0, 300.0
"""Default seconds for which more replicas, or fewer, must be wanted before their number changes."""

_MOST, _TARGET = 0.8, 0.6
"""Mean strain above which replicas are started, and the mean strain to reach."""
_FEWER = 0.5
"""A replica is ended if the mean strain of the others would stay below this."""
_UNPROMISED_WAITING = 8
"""Without promises, so many waiting requests strain a replica as much as a promise that is about to
be broken."""


def strain(state: ReplicaState, classes: Iterable[SloClass], role: Role = "both") -> float:
    """Return the strain of one replica, at least 0.

    A prefill replica promises nothing about gaps between tokens, which other replicas send.
    """
    shares: list[float] = []
    for slo in classes:
        if slo.ttft_s is not None:
            shares.append(state.delay_s / slo.ttft_s)
        if slo.promise_s is not None and role != "prefill":
            shares.append(state.itl_s / slo.promise_s)
    return max(shares) if shares else state.num_waiting / _UNPROMISED_WAITING


def wanted_replicas(strains: Sequence[float]) -> int:
    """Return how many replicas there should be, given the strain of each replica."""
    num_replicas = len(strains)
    if not strains:
        return 0
    mean = sum(strains) / num_replicas
    if mean > _MOST:
        return max(num_replicas + 1, math.ceil(mean / _TARGET * num_replicas))
    if num_replicas > 1 and mean * num_replicas / (num_replicas - 1) < _FEWER:
        return num_replicas - 1
    return num_replicas
