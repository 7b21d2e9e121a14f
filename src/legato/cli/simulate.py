"""`legato simulate`: compare scheduling policies on a virtual clock."""

import argparse
import importlib.util
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legato.cli.bench_flags import add_output_flag
from legato.cli.simulate_flags import (
    DEFAULT_POLICIES,
    add_server_flags,
    promised_slos,
    simulated_server,
)
from legato.cli.values import rates
from legato.cli.workload_flags import add_workload_flags, workload_choice
from legato.core.errors import ConfigError

if TYPE_CHECKING:
    from legato.bench.report.report_file import Report
    from legato.bench.simulation.profiled_server import SimulatedServer
    from legato.bench.simulation.run import SimulatedRun
    from legato.observe.traces.tracer import TraceWriter

_NOT_SETTINGS = {"run", "policies", "output", "trace"}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="compare scheduling policies without a machine to run them on",
        description="Serve a workload on a virtual clock, with the engine's own scheduler and "
        "steps that only last: minutes pass in seconds. What is promised also decides what counts "
        "as goodput.",
        allow_abbrev=False,
    )
    add_workload_flags(parser)
    add_server_flags(parser)
    _add_report_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate every policy, print and write what came of it; returns the exit status."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("matplotlib missing: pip install 'legato[bench]'")
    if args.capacity and args.itl_slo_s is None:
        raise ConfigError("--capacity is the largest rate that keeps --itl-slo, but none is set")
    if args.trace and (args.capacity or args.rates):
        raise ConfigError("--trace is of one run, but --capacity and --rates make many")
    if args.rates and args.rate is not None:
        raise ConfigError("--rates takes the place of --rate")
    # The tables say which promises were broken.
    logging.basicConfig(level=logging.ERROR)
    report_of = _run_report
    if args.capacity or args.rates:
        report_of = _capacity_report if args.capacity else _sweep_report
    policies = dict.fromkeys(args.policies or DEFAULT_POLICIES)  # each once
    servers = {policy: simulated_server(args, policy) for policy in policies}
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
        help="find the largest Poisson rate at which P99 ITL keeps its SLO and the median "
        "scheduling delay stays below 2 s, beginning with --rate",
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="record every step and request, as serve --trace does; with several policies, each in "
        "a file of its own, with its name in FILE's",
    )
    add_output_flag(group)


def _run_report(args: argparse.Namespace, policy: str, server: "SimulatedServer") -> "Report":
    from legato.bench.report.report_file import RunReport
    from legato.bench.simulation.sessions import simulate_run

    workload = workload_choice(args, server.profile.max_model_len).load()
    started_s = time.perf_counter()
    with _trace(args, policy) as trace:
        simulated = simulate_run(server, workload, policy, trace)
    _tell(policy, simulated, time.perf_counter() - started_s)
    settings = _settings(args, policy)
    return RunReport.of(policy, settings, promised_slos(args), simulated.records)


@contextmanager
def _trace(args: argparse.Namespace, policy: str) -> "Iterator[TraceWriter | None]":
    """Where the run is recorded to, if it is to be.

    Raises:
        ConfigError: no format has such names, or the file cannot be written.
    """
    from legato.observe.traces.trace_file import TraceHeader
    from legato.observe.traces.tracer import trace_writer

    if args.trace is None:
        yield None
        return
    path: Path = args.trace
    if len(set(args.policies or DEFAULT_POLICIES)) > 1:
        stem, *suffixes = path.name.split(".", maxsplit=1)
        path = path.with_name(".".join([f"{stem}-{policy.replace(':', '-')}", *suffixes]))
    settings = {name: str(value) for name, value in _settings(args, policy).items()}
    try:
        writer = trace_writer(path, TraceHeader(started_s=0.0, unix_s=None, settings=settings))
        yield writer
        writer.close()
    except OSError as error:
        raise ConfigError(f"cannot write the trace: {error}") from error


def _capacity_report(args: argparse.Namespace, policy: str, server: "SimulatedServer") -> "Report":
    from legato.bench.report.report_file import CapacityReport
    from legato.bench.simulation.sessions import simulate_search

    capacity = simulate_search(
        server,
        workload_choice(args, server.profile.max_model_len),
        itl_slo_s=args.itl_slo_s,
        itl_slo_quantile=args.itl_slo_quantile,
        start_rate_per_s=args.rate or 1.0,
    )
    return CapacityReport(name=policy, settings=_settings(args, policy), capacity=capacity)


def _sweep_report(args: argparse.Namespace, policy: str, server: "SimulatedServer") -> "Report":
    from legato.bench.report.report_file import SweepReport
    from legato.bench.simulation.sessions import simulate_run
    from legato.bench.sweep import LoadKind, at_rate

    choice, slos = workload_choice(args, server.profile.max_model_len), promised_slos(args)
    report = SweepReport(
        name=policy, settings=_settings(args, policy), load_kind=LoadKind.RATE, points=[]
    )
    for rate_per_s in args.rates:
        label = f"{policy}, {LoadKind.RATE.describe(rate_per_s)}"
        simulated = simulate_run(server, at_rate(choice, rate_per_s), label)
        report = report.with_point(report.point(rate_per_s, slos, simulated.records))
    return report


def _tell(policy: str, simulated: "SimulatedRun", wall_s: float) -> None:
    from rich.console import Console

    stats = simulated.stats
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"{policy}: {simulated.duration_s:.0f} s in {wall_s:.1f} s; {simulated.num_steps} steps, "
        f"of which {stats.num_steps_over_budget} over budget; {stats.num_preemptions} preemptions"
    )


def _publish(args: argparse.Namespace, reports: "list[Report]") -> None:
    """Print the reports side by side, and write each as JSON and all as one page."""
    from legato.bench.report.console import print_table
    from legato.bench.report.page import render_page
    from legato.bench.report.report_file import write_report
    from legato.bench.report.tables import tables

    for table in tables(reports):
        print_table(table)
    kind = "capacity" if args.capacity else "sweep" if args.rates else "run"
    for report in reports:
        name = report.name.replace(":", "-")
        write_report(args.output / f"simulated-{kind}-{name}.json", report)
    page = args.output / f"simulated-{kind}.html"
    page.write_text(render_page(reports), encoding="utf-8")
    print(f"written to {page}, and as JSON beside it")


def _settings(args: argparse.Namespace, policy: str) -> dict[str, Any]:
    """What belongs into a report; key a flag's name."""
    given = {key: value for key, value in vars(args).items() if key not in _NOT_SETTINGS}
    return {"policy": policy, **given}
