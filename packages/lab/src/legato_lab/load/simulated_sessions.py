"""Complete measurements of a simulated server or fleet, with progress in the terminal."""

import math

from legato.observe.traces.tracer import TraceWriter
from legato_lab.capacity.rule import TrialWatch
from legato_lab.capacity.search import Capacity, SearchSettings, find_capacity
from legato_lab.capacity.trial import Load
from legato_lab.capacity.unloaded import UnloadedTtft, unloaded_workload
from legato_lab.report.console import print_trial, progress_bar
from legato_lab.report.fleet_figures import FleetFigures, ReplicaFigures
from legato_lab.simulation.fleet import SimulatedFleet
from legato_lab.simulation.fleet_run import FleetRun, simulate_fleet
from legato_lab.simulation.record import OnProgress, RequestRecord, StopWhen
from legato_lab.simulation.replica import ReplicaRun
from legato_lab.simulation.simulated_run import Simulable, SimulatedRun, simulate
from legato_lab.simulation.tally import Tally
from legato_lab.simulation.workload import Workload
from legato_lab.workload.choice import WorkloadChoice


def simulate_run(
    server: Simulable | SimulatedFleet,
    workload: Workload,
    name: str,
    trace: TraceWriter | None = None,
    tally: Tally | None = None,
) -> SimulatedRun | FleetRun:
    """Run `simulate` or `simulate_fleet` with a progress bar; only `simulate` writes a trace."""
    with progress_bar(name, len(workload)) as on_progress:
        if isinstance(server, SimulatedFleet):
            return simulate_fleet(server, workload, on_progress, tally=tally)
        on_records = None if trace is None else trace.write
        return simulate(server, workload, on_progress, on_records, tally=tally)


def fleet_figures(run: FleetRun) -> FleetFigures:
    """Return a fleet's figures for a report."""
    return FleetFigures(
        replicas=[_figures(replica) for replica in run.replicas],
        num_tried_again=run.num_tried_again,
        num_retries=run.num_retries,
        num_reruns=run.num_reruns,
        num_lost=run.num_lost,
    )


def _figures(replica: ReplicaRun) -> ReplicaFigures:
    stats = replica.stats
    num_prompt, num_cached = stats.num_prefix_cache_queries, stats.num_prefix_cache_hits
    return ReplicaFigures(
        replica_id=replica.replica_id,
        role=replica.role,
        started_s=replica.started_s,
        ended_s=replica.ended_s,
        is_lost=replica.is_lost,
        num_requests=replica.num_requests,
        num_steps=replica.num_steps,
        busy_s=replica.busy_s,
        cached_share=num_cached / num_prompt if num_prompt else None,
        num_preemptions=stats.num_preemptions,
        num_steps_over_budget=stats.num_steps_over_budget,
    )


def simulate_search(
    server: Simulable | SimulatedFleet, choice: WorkloadChoice, settings: SearchSettings
) -> Capacity:
    """Find the capacity of a server or a fleet.

    Raises:
        ConfigError: as `simulate` and `WorkloadChoice.trials`, or the server refuses a request even
            when it is idle.
    """
    source = choice.trials()

    def run_trial(load: Load, workload: Workload) -> list[RequestRecord]:
        watch = TrialWatch(rule, load, workload)
        with progress_bar(f"{load.rate_per_s:.3g}/s", len(workload)) as on_progress:
            return _records(
                server, workload, on_progress, until_s=load.end_s, stop_when=watch.is_lost
            )

    alone = unloaded_workload(source.requests)
    idle = [_records(server, [request])[0] for request in alone]
    rule = settings.rule(UnloadedTtft.of(idle))
    return find_capacity(run_trial, source, rule, settings, print_trial)


def _records(
    server: Simulable | SimulatedFleet,
    workload: Workload,
    on_progress: OnProgress | None = None,
    *,
    until_s: float = math.inf,
    stop_when: StopWhen | None = None,
) -> list[RequestRecord]:
    if isinstance(server, SimulatedFleet):
        run: SimulatedRun | FleetRun = simulate_fleet(
            server, workload, on_progress, until_s=until_s, stop_when=stop_when
        )
    else:
        run = simulate(server, workload, on_progress, until_s=until_s, stop_when=stop_when)
    return run.records
