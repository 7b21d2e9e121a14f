"""`legato simulate`: compare scheduling policies on a virtual clock."""

import argparse
import importlib.util
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legato.cli.values import rates
from legato.core.errors import ConfigError
from legato.core.version import install_command
from legato_lab.commands.bench_flags import add_output_flag, add_trial_flags
from legato_lab.commands.bench_reports import report_settings
from legato_lab.commands.capacity_settings import FIRST_RATE_PER_S, LEAST_S, search_settings
from legato_lab.commands.fleet_flags import add_fleet_flags, simulated_fleets
from legato_lab.commands.simulate_flags import (
    add_server_flags,
    policies,
    promised_slos,
    simulated_server,
)
from legato_lab.commands.workload_flags import (
    add_workload_flags,
    tell_notes,
    trial_choice,
    workload_choice,
)

if TYPE_CHECKING:
    from legato.observe.traces.tracer import TraceWriter
    from legato_lab.report.report_file import Report
    from legato_lab.simulation.fleet import SimulatedFleet
    from legato_lab.simulation.fleet_run import FleetRun
    from legato_lab.simulation.profiled_server import SimulatedServer
    from legato_lab.simulation.simulated_run import SimulatedRun
    from legato_lab.workload.choice import WorkloadChoice

_TRIAL_REQUESTS = 1000
_MOST_RECORDS = 100_000
"""With more requests, only figures are kept: the records would take half a gigabyte."""
_NOT_SETTINGS = {"run", "policies", "fleets", "routing", "output", "trace"}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="compare scheduling policies without a machine to run them on",
        description="Serve a workload on a virtual clock, with the engine's own scheduler and "
        "steps that only last: minutes pass in seconds. What is promised also decides what counts "
        "as goodput.",
    )
    add_workload_flags(parser)
    add_server_flags(parser)
    add_fleet_flags(parser)
    _add_report_flags(parser)
    add_trial_flags(parser.add_argument_group("search (--capacity)"), precision=0.02, num_seeds=3)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate every policy, print and write the results; returns the exit status."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"matplotlib missing: {install_command('bench')}")
    if args.capacity and args.itl_slo_s is None:
        raise ConfigError("--capacity is the largest rate that keeps --itl-slo, but none is set")
    if args.trace and (args.capacity or args.rates):
        raise ConfigError("--trace is of one run, but --capacity and --rates make many")
    if args.trace and args.fleets:
        raise ConfigError("--trace is of one engine, but --fleet has many")
    if args.rates and args.rate is not None:
        raise ConfigError("--rates takes the place of --rate")
    # The tables say which promises were broken.
    logging.basicConfig(level=logging.ERROR)
    report_of = _run_report
    if args.capacity or args.rates:
        report_of = _capacity_report if args.capacity else _sweep_report
    servers = _servers(args)
    tell_notes(_choice(args, next(iter(servers.values()))).notes())
    _publish(args, [report_of(args, policy, server) for policy, server in servers.items()])
    return 0


def _add_report_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("report")
    kinds = group.add_mutually_exclusive_group()
    kinds.add_argument(
        "--rates",
        type=rates,
        metavar="R,R,...",
        help="simulate at each of these rates, for --duration (60 s) or --num-requests, and draw "
        "latency over throughput",
    )
    kinds.add_argument(
        "--capacity",
        action="store_true",
        help="find the largest Poisson rate that is sustained, as `legato bench capacity` does: "
        f"beginning with --rate ({FIRST_RATE_PER_S:g} a second), in trials of --duration "
        f"({LEAST_S:g} s, which is the least), of 20 median end-to-end times and of "
        f"--num-requests ({_TRIAL_REQUESTS}), whichever is the longest",
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="record every step and request, as serve --trace does; with several policies, each in "
        "a file of its own, with its name in FILE's",
    )
    add_output_flag(group)


def _servers(args: argparse.Namespace) -> "dict[str, SimulatedServer | SimulatedFleet]":
    """Return the servers or fleets to compare; key the name of each."""
    servers = {policy: simulated_server(args, policy) for policy in policies(args)}
    profile = next(iter(servers.values())).profile
    fleets = simulated_fleets(args, {**servers}, profile.kv_token_bytes)
    return {**fleets} if fleets else {**servers}


def _run_report(
    args: argparse.Namespace, name: str, server: "SimulatedServer | SimulatedFleet"
) -> "Report":
    import msgspec

    from legato_lab.load.simulated_sessions import fleet_figures, simulate_run
    from legato_lab.report.report_file import RunReport
    from legato_lab.simulation.fleet_run import FleetRun
    from legato_lab.simulation.tally import Tally

    choice = _choice(args, server)
    workload = choice.load()
    slos = promised_slos(args)
    tally = Tally(slos) if len(workload) > _MOST_RECORDS else None
    started_s = time.perf_counter()
    with _trace(args, name) as trace:
        simulated = simulate_run(server, workload, name, trace, tally)
    _tell(name, simulated, time.perf_counter() - started_s)
    settings = _settings(args, name)
    if tally is None:
        report = RunReport.of(name, settings, slos, simulated.records, choice.notes())
    else:
        report = RunReport.tallied(name, settings, tally, choice.notes())
    if isinstance(simulated, FleetRun):
        report = msgspec.structs.replace(report, fleet=fleet_figures(simulated))
    return report


def _choice(
    args: argparse.Namespace, server: "SimulatedServer | SimulatedFleet"
) -> "WorkloadChoice":
    choose = trial_choice if args.capacity else workload_choice
    return choose(args, server.max_model_len)


@contextmanager
def _trace(args: argparse.Namespace, policy: str) -> "Iterator[TraceWriter | None]":
    """Open the trace of a run; None if none was asked for.

    Raises:
        ConfigError: the file's name fits no format, or it cannot be written.
    """
    from legato.observe.traces.trace_file import TraceHeader
    from legato.observe.traces.tracer import trace_writer

    if args.trace is None:
        yield None
        return
    path: Path = args.trace
    if len(policies(args)) > 1:
        stem, *suffixes = path.name.split(".", maxsplit=1)
        path = path.with_name(".".join([f"{stem}-{policy.replace(':', '-')}", *suffixes]))
    settings = {name: str(value) for name, value in _settings(args, policy).items()}
    try:
        writer = trace_writer(path, TraceHeader(started_s=0.0, unix_s=None, settings=settings))
        yield writer
        writer.close()
    except OSError as error:
        raise ConfigError(f"cannot write the trace: {error}") from error


def _capacity_report(
    args: argparse.Namespace, name: str, server: "SimulatedServer | SimulatedFleet"
) -> "Report":
    from legato_lab.load.simulated_sessions import simulate_search
    from legato_lab.report.report_file import CapacityReport

    choice = _choice(args, server)
    capacity = simulate_search(
        server,
        choice,
        search_settings(args, args.itl_slo_s, _TRIAL_REQUESTS),
    )
    settings = _settings(args, name)
    return CapacityReport(name=name, settings=settings, capacity=capacity, notes=choice.notes())


def _sweep_report(
    args: argparse.Namespace, name: str, server: "SimulatedServer | SimulatedFleet"
) -> "Report":
    from legato_lab.load.simulated_sessions import simulate_run
    from legato_lab.report.report_file import SweepReport
    from legato_lab.sweep import LoadKind, at_rate

    choice, slos = _choice(args, server), promised_slos(args)
    report = SweepReport(
        name=name,
        settings=_settings(args, name),
        load_kind=LoadKind.RATE,
        points=[],
        notes=choice.notes(),
    )
    for rate_per_s in args.rates:
        label = f"{name}, {LoadKind.RATE.describe(rate_per_s)}"
        simulated = simulate_run(server, at_rate(choice, rate_per_s), label)
        report = report.with_point(report.point(rate_per_s, slos, simulated.records))
    return report


def _tell(name: str, simulated: "SimulatedRun | FleetRun", wall_s: float) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"{name}: {simulated.duration_s:.0f} s in {wall_s:.1f} s; {simulated.num_steps} steps, "
        f"of which {simulated.num_steps_over_budget} over budget; "
        f"{simulated.num_preemptions} preemptions"
    )


def _publish(args: argparse.Namespace, reports: "list[Report]") -> None:
    """Print the reports side by side, and write each as JSON and all as one page."""
    from legato.cli.table import print_table
    from legato_lab.report.page import render_page
    from legato_lab.report.report_file import write_report
    from legato_lab.report.tables import tables

    for table in tables(reports):
        print_table(table)
    kind = "capacity" if args.capacity else "sweep" if args.rates else "run"
    for report in reports:
        name = re.sub(r"[^\w.]+", "-", report.name)
        write_report(args.output / f"simulated-{kind}-{name}.json", report)
    page = args.output / f"simulated-{kind}.html"
    page.write_text(render_page(reports), encoding="utf-8")
    print(f"written to {page}, and as JSON beside it")


def _settings(args: argparse.Namespace, name: str) -> dict[str, Any]:
    return {"policy": name, **report_settings(args, _NOT_SETTINGS)}
