"""What is it worth to send each request to the right replica? Four routings, one after the other.

    python -m benchmarks routing [--traffic azure conversations] [--seconds 120] [--rate 8]
                                 [--virtual --seeds 0 1 2 3] [--trace FILE]

Starts a fleet of replicas that compute nothing and whose steps last as a profile says, in real
time: behind the front door of `legato fleet`, on Ray Serve where that is installed. Each routing
gets the same requests at the same times. With `--virtual`, the simulator serves them, and takes
seconds. Writes a page for each traffic, too, of what ran in real time.
"""

import argparse
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.routing.fleets import (
    Fleet,
    add_fleet_flags,
    fleet_of,
    in_real_time,
    on_a_virtual_clock,
)
from benchmarks.routing.report import figures, plot, table
from benchmarks.routing.traffic import MAX_MODEL_LEN, RATES_PER_S, TRAFFIC
from benchmarks.runner.flags import add_seconds
from benchmarks.runner.main import main
from benchmarks.runner.run import Run
from legato.cli.table import duration
from legato_fleet.routing.router import ROUTING_POLICIES
from legato_lab.report.console import progress_bar
from legato_lab.report.page import render_page
from legato_lab.report.report_file import RunReport
from legato_lab.simulation.record import RequestRecord
from legato_lab.simulation.workload import Workload
from legato_lab.workload.choice import WorkloadChoice

MINUTES = 20

_ROUTINGS = tuple(reversed(ROUTING_POLICIES))
"""The simplest first."""


class Case(NamedTuple):
    """Attributes: traffic: its name."""

    traffic: str
    routing: str
    seed: int


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--traffic", nargs="+", choices=list(TRAFFIC), default=list(TRAFFIC))
    parser.add_argument("--trace", type=Path, help="a file of requests instead of made-up ones")
    parser.add_argument("--routing", nargs="+", choices=_ROUTINGS, default=list(_ROUTINGS))
    add_seconds(parser, 120.0)
    parser.add_argument("--warm-up", type=float, default=0.0, help="of these, not counted")
    parser.add_argument(
        "--rate", type=float, help=f"requests a second (default: {RATES_PER_S}; a trace's own)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--virtual", action="store_true", help="on a virtual clock")
    add_fleet_flags(parser)


def measure(run: Run) -> None:
    flags = run.flags
    fleet = fleet_of(flags)
    traffics = ["trace"] if flags.trace else flags.traffic
    cases = [
        Case(traffic, routing, seed)
        for traffic in traffics
        for seed in flags.seeds
        for routing in flags.routing
    ]
    serve = _simulated if flags.virtual else _served
    records = {
        case: [one for one in served if one.request.arrival_s >= flags.warm_up]
        for case, served in serve(run, fleet, cases)
    }
    found = {
        traffic: {
            routing: figures(
                [records[Case(traffic, routing, seed)] for seed in flags.seeds], fleet.slos
            )
            for routing in flags.routing
        }
        for traffic in traffics
    }
    run.picture(plot(found))
    for traffic, of_routings in found.items():
        run.show(table(f"{traffic}, {fleet.num_replicas} replicas", of_routings))
        if not flags.virtual:
            _write_page(run, fleet, traffic, records)
    run.write({"fleet": fleet, "figures": found})


def _settings(flags: argparse.Namespace) -> dict[str, str]:
    return {name: str(value) for name, value in vars(flags).items()}


def _workload(flags: argparse.Namespace, case: Case) -> Workload:
    if not flags.trace:
        rate_per_s = flags.rate or RATES_PER_S[case.traffic]
        return TRAFFIC[case.traffic](flags.seconds, rate_per_s, case.seed)
    return WorkloadChoice(
        source=str(flags.trace),
        rate_per_s=flags.rate,
        duration_s=flags.seconds,
        max_model_len=MAX_MODEL_LEN,
        too_long="drop",
    ).load()


def _simulated(
    run: Run, fleet: Fleet, cases: list[Case]
) -> Iterator[tuple[Case, list[RequestRecord]]]:
    workloads = [_workload(run.flags, case) for case in cases]
    with ProcessPoolExecutor() as pool:
        runs = pool.map(
            on_a_virtual_clock,
            [fleet] * len(cases),
            [case.routing for case in cases],
            workloads,
            [case.seed for case in cases],
        )
        yield from zip(cases, runs, strict=True)


def _served(
    run: Run, fleet: Fleet, cases: list[Case]
) -> Iterator[tuple[Case, list[RequestRecord]]]:
    with run.path(".log").open("w") as log:
        for case in cases:
            workload = _workload(run.flags, case)
            name = f"{case.traffic}, {case.routing}"
            with progress_bar(name, len(workload)) as on_progress:
                real = in_real_time(fleet, case.routing, workload, log, on_progress)
            late_s = duration(float(np.percentile(real.late_s, 99)))
            run.tell(
                f"{name}: {len(workload)} requests; processors were busy to {real.cpu_share:.0%}, "
                f"and the client was late by {late_s} (p99)"
            )
            yield case, real.records


def _write_page(
    run: Run, fleet: Fleet, traffic: str, records: dict[Case, list[RequestRecord]]
) -> None:
    reports = [
        RunReport.of(case.routing, _settings(run.flags), fleet.slos, own)
        for case, own in records.items()
        if case.traffic == traffic
    ]
    run.path(f"-{traffic}.html").write_text(render_page(reports), encoding="utf-8")


if __name__ == "__main__":
    main("routing")
