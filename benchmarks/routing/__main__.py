"""What is it worth to send each request to the right replica? Four routings, one after the other.

    python -m benchmarks.routing [--traffic azure conversations] [--seconds 120] [--rate 8]
                                 [--virtual --seeds 0 1 2 3] [--trace FILE] [--out out]

Starts a fleet of replicas that compute nothing and whose steps last as a profile says, in real
time: behind the front door of `legato fleet`, on Ray Serve where that is installed. Each routing
gets the same requests at the same times. With `--virtual`, the simulator serves them, and takes
seconds. Prints tables and writes routing.json, routing.png and, of what ran in real time, a page
for each traffic.
"""

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from rich.console import Console

from benchmarks.routing.fleets import Fleet, in_real_time, on_a_virtual_clock
from benchmarks.routing.report import figures, plot, table
from benchmarks.routing.traffic import MAX_MODEL_LEN, RATES_PER_S, TRAFFIC
from legato.cli.table import duration, print_table
from legato.cli.values import duration_s
from legato.lab.report.console import progress_bar
from legato.lab.report.page import render_page
from legato.lab.report.report_file import RunReport
from legato.lab.workload.choice import WorkloadChoice
from legato.routing.router import ROUTING_POLICIES
from legato.simulation.record import RequestRecord
from legato.simulation.workload import Workload

_ROUTINGS = tuple(reversed(ROUTING_POLICIES))
"""The simplest first."""


class Case(NamedTuple):
    """Attributes: traffic: its name."""

    traffic: str
    routing: str
    seed: int


def main() -> int:
    arguments = _parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    fleet = fleet_of(arguments)
    traffics = ["trace"] if arguments.trace else arguments.traffic
    cases = [
        Case(traffic, routing, seed)
        for traffic in traffics
        for seed in arguments.seeds
        for routing in arguments.routing
    ]
    serve = _simulated if arguments.virtual else _served
    records = {
        case: [one for one in served if one.request.arrival_s >= arguments.warm_up]
        for case, served in serve(arguments, fleet, cases)
    }
    found = {
        traffic: {
            routing: figures(
                [records[Case(traffic, routing, seed)] for seed in arguments.seeds], fleet.slos
            )
            for routing in arguments.routing
        }
        for traffic in traffics
    }
    for traffic, of_routings in found.items():
        print_table(table(f"{traffic}, {fleet.num_replicas} replicas", of_routings))
        if not arguments.virtual:
            _write_page(arguments, fleet, traffic, records)
    written = {"fleet": fleet, "settings": _settings(arguments), "figures": found}
    (arguments.out / "routing.json").write_bytes(msgspec.json.format(msgspec.json.encode(written)))
    plot(found, arguments.out / "routing.png")
    print(f"written to {arguments.out}/routing.json and routing.png")
    return 0


def add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    """Add those from which `fleet_of` makes a fleet."""
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--simulate", default="codellama-34b-a100-tp2", metavar="PROFILE")
    parser.add_argument("--itl-slo", type=duration_s, default=0.1, metavar="DURATION")
    parser.add_argument("--ttft-slo", type=duration_s, default=3.0, metavar="DURATION")
    parser.add_argument("--shed-load", action="store_true", help="refuse what would be late")


def fleet_of(arguments: argparse.Namespace) -> Fleet:
    return Fleet(
        profile=arguments.simulate,
        num_replicas=arguments.replicas,
        itl_slo_s=arguments.itl_slo,
        ttft_slo_s=arguments.ttft_slo,
        is_shedding=arguments.shed_load,
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traffic", nargs="+", choices=list(TRAFFIC), default=list(TRAFFIC))
    parser.add_argument("--trace", type=Path, help="a file of requests instead of made-up ones")
    parser.add_argument("--routing", nargs="+", choices=_ROUTINGS, default=list(_ROUTINGS))
    parser.add_argument("--seconds", type=float, default=120.0, help="in which requests come")
    parser.add_argument("--warm-up", type=float, default=0.0, help="of these, not counted")
    parser.add_argument(
        "--rate", type=float, help=f"requests a second (default: {RATES_PER_S}; a trace's own)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--virtual", action="store_true", help="on a virtual clock")
    parser.add_argument("--out", type=Path, default=Path("out"))
    add_fleet_flags(parser)
    return parser.parse_args()


def _settings(arguments: argparse.Namespace) -> dict[str, str]:
    return {name: str(value) for name, value in vars(arguments).items()}


def _workload(arguments: argparse.Namespace, case: Case) -> Workload:
    if not arguments.trace:
        rate_per_s = arguments.rate or RATES_PER_S[case.traffic]
        return TRAFFIC[case.traffic](arguments.seconds, rate_per_s, case.seed)
    return WorkloadChoice(
        source=str(arguments.trace),
        rate_per_s=arguments.rate,
        duration_s=arguments.seconds,
        max_model_len=MAX_MODEL_LEN,
        too_long="drop",
    ).load()


def _simulated(
    arguments: argparse.Namespace, fleet: Fleet, cases: list[Case]
) -> Iterator[tuple[Case, list[RequestRecord]]]:
    workloads = [_workload(arguments, case) for case in cases]
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
    arguments: argparse.Namespace, fleet: Fleet, cases: list[Case]
) -> Iterator[tuple[Case, list[RequestRecord]]]:
    console = Console(stderr=True, highlight=False)
    with (arguments.out / "routing.log").open("w") as log:
        for case in cases:
            workload = _workload(arguments, case)
            name = f"{case.traffic}, {case.routing}"
            with progress_bar(name, len(workload)) as on_progress:
                run = in_real_time(fleet, case.routing, workload, log, on_progress)
            late_s = duration(float(np.percentile(run.late_s, 99)))
            console.print(
                f"{name}: {len(workload)} requests; processors were busy to {run.cpu_share:.0%}, "
                f"and the client was late by {late_s} (p99)"
            )
            yield case, run.records


def _write_page(
    arguments: argparse.Namespace,
    fleet: Fleet,
    traffic: str,
    records: dict[Case, list[RequestRecord]],
) -> None:
    reports = [
        RunReport.of(case.routing, _settings(arguments), fleet.slos, own)
        for case, own in records.items()
        if case.traffic == traffic
    ]
    path = arguments.out / f"routing-{traffic}.html"
    path.write_text(render_page(reports), encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main())
