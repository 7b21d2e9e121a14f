"""Serves a workload by a fleet on a virtual clock: its router, and an engine for each replica."""

import math

import msgspec

from legato_lab.simulation.fleet import SimulatedFleet
from legato_lab.simulation.fleet_simulation import FleetSimulation
from legato_lab.simulation.record import OnProgress, RequestRecord, StopWhen
from legato_lab.simulation.replica import ReplicaRun
from legato_lab.simulation.simulated_run import check_servable
from legato_lab.simulation.tally import Tally
from legato_lab.simulation.workload import Workload

_STEPS_PER_LOOK = 256


class FleetRun(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a workload.

    Attributes:
        records: of the requests that were sent, by arrival; empty if they were tallied.
        duration_s: from the start of the run to the last step, on the virtual clock.
        replicas: all that have served, including dead ones.
        num_tried_again: how often a request refused by a replica was sent to another.
        num_retries: how often clients sent a refused request again.
        num_reruns: requests rerun elsewhere because their replica died or hung.
        num_lost: requests that a dead replica ended.
    """

    records: list[RequestRecord]
    duration_s: float
    replicas: list[ReplicaRun]
    num_tried_again: int = 0
    num_retries: int = 0
    num_reruns: int = 0
    num_lost: int = 0

    @property
    def num_steps(self) -> int:
        return sum(replica.num_steps for replica in self.replicas)

    @property
    def num_steps_over_budget(self) -> int:
        return sum(replica.stats.num_steps_over_budget for replica in self.replicas)

    @property
    def num_preemptions(self) -> int:
        return sum(replica.stats.num_preemptions for replica in self.replicas)


def simulate_fleet(
    fleet: SimulatedFleet,
    workload: Workload,
    on_progress: OnProgress | None = None,
    *,
    until_s: float = math.inf,
    stop_when: StopWhen | None = None,
    tally: Tally | None = None,
) -> FleetRun:
    """Serve a workload by a fleet that has just started.

    Args:
        on_progress, until_s, stop_when: as of `simulate`.
        tally: takes the records instead of the run, which may then be of any length; excludes
            `stop_when`, which reads them.

    Raises:
        ConfigError: a request names a class that the server does not know, or is too long, or there
            is no such routing policy.
    """
    check_servable(fleet.server, workload)
    simulation = FleetSimulation(fleet, workload, tally)
    clients = simulation.clients
    num_steps = 0
    while simulation.now_s < until_s and simulation.goes_on:
        num_steps += simulation.advance()
        if num_steps % _STEPS_PER_LOOK:
            continue
        if on_progress is not None:
            on_progress(clients.counts)
        if stop_when is not None and stop_when(simulation.now_s, clients.records_as_sent()):
            break
    clients.cancel()
    return FleetRun(
        records=[] if tally is not None else clients.records(),
        duration_s=simulation.now_s,
        replicas=simulation.replica_runs(),
        num_tried_again=simulation.num_tried_again,
        num_retries=clients.num_retries,
        num_reruns=simulation.num_reruns,
        num_lost=simulation.num_lost,
    )
