"""Whole measurements of a simulated server, with their progress in the terminal."""

from legato.bench.capacity.rule import TrialWatch
from legato.bench.capacity.search import Capacity, SearchSettings, find_capacity
from legato.bench.capacity.trial import Load
from legato.bench.capacity.unloaded import UnloadedTtft, unloaded_workload
from legato.bench.load.record import RequestRecord
from legato.bench.report.console import print_trial, progress_bar
from legato.bench.simulation.profiled_server import SimulatedServer
from legato.bench.simulation.run import Simulable, SimulatedRun, simulate
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
    server: Simulable, choice: WorkloadChoice, settings: SearchSettings
) -> Capacity:
    """Find the server's capacity.

    Raises:
        ConfigError: as `simulate` and `WorkloadChoice.trials`, or the server refuses a request even
            when it is idle.
    """
    source = choice.trials()

    def run_trial(load: Load, workload: Workload) -> list[RequestRecord]:
        watch = TrialWatch(rule, load, workload)
        with progress_bar(f"{load.rate_per_s:.3g}/s", len(workload)) as on_progress:
            return simulate(
                server, workload, on_progress, until_s=load.end_s, stop_when=watch.is_lost
            ).records

    alone = unloaded_workload(source.requests)
    idle = [simulate(server, [request]).records[0] for request in alone]
    rule = settings.rule(UnloadedTtft.of(idle))
    return find_capacity(run_trial, source, rule, settings, print_trial)
