"""Whole measurements of a simulated server, with their progress in the terminal."""

from legato.bench.capacity import (
    Capacity,
    CapacityRule,
    UnloadedTtft,
    find_capacity,
    unloaded_workload,
)
from legato.bench.load.record import RequestRecord
from legato.bench.report.console import print_trial, progress_bar
from legato.bench.simulation.profiled_server import SimulatedServer
from legato.bench.simulation.run import SimulatedRun, simulate
from legato.bench.workload.choice import WorkloadChoice
from legato.bench.workload.requests import Workload
from legato.observe.traces.tracer import TraceWriter


def simulate_run(
    server: SimulatedServer, workload: Workload, name: str, trace: TraceWriter | None = None
) -> SimulatedRun:
    """As `simulate`, and into a trace, if there is one."""
    with progress_bar(name, len(workload)) as on_progress:
        on_records = None if trace is None else trace.write
        return simulate(server, workload, on_progress, on_records)


def simulate_search(
    server: SimulatedServer,
    choice: WorkloadChoice,
    *,
    itl_slo_s: float,
    itl_slo_quantile: float,
    start_rate_per_s: float,
) -> Capacity:
    """Find the server's capacity; each trial is the choice at another Poisson rate.

    Raises:
        ConfigError: as `simulate` and `WorkloadChoice.at_poisson_rate`, or the server refuses a
            request even when it is idle.
    """

    def run_trial(rate_per_s: float) -> list[RequestRecord]:
        workload = choice.at_poisson_rate(rate_per_s)
        return simulate_run(server, workload, f"{rate_per_s:.3g}/s").records

    alone = unloaded_workload(choice.at_poisson_rate(start_rate_per_s))
    idle = [simulate(server, [request]).records[0] for request in alone]
    rule = CapacityRule(
        itl_slo_s=itl_slo_s, itl_slo_quantile=itl_slo_quantile, unloaded=UnloadedTtft.of(idle)
    )
    return find_capacity(run_trial, rule, start_rate_per_s=start_rate_per_s, on_trial=print_trial)
