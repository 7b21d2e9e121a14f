"""`legato bench`: load and measure any OpenAI-compatible server."""

import argparse
import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from legato.cli.values import count
from legato.core.errors import ConfigError
from legato.core.version import install_command
from legato_lab.commands.bench_compare import add_compare_parser
from legato_lab.commands.bench_flags import (
    add_output_flags,
    add_probe_flags,
    add_search_flags,
    add_server_flags,
    add_slo_flags,
    promised_slos,
    server_address,
)
from legato_lab.commands.bench_kernels import add_kernels_parser
from legato_lab.commands.bench_reports import publish, report_settings
from legato_lab.commands.bench_sweep import add_sweep_parser
from legato_lab.commands.capacity_settings import FIRST_RATE_PER_S, LEAST_S, search_settings
from legato_lab.commands.workload_flags import (
    add_workload_flags,
    tell_notes,
    trial_choice,
    workload_choice,
)

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_TRIAL_REQUESTS = 100


def add_parser(subparsers: "Subparsers") -> None:
    parser = subparsers.add_parser(
        "bench",
        help="load and measure any OpenAI-compatible server",
        description="Load and measure any OpenAI-compatible server.",
    )
    parser.set_defaults(run=run)
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    _add_run_parser(benchmarks)
    add_sweep_parser(benchmarks)
    _add_capacity_parser(benchmarks)
    _add_probe_parser(benchmarks)
    add_kernels_parser(benchmarks)
    _add_report_parser(benchmarks)
    add_compare_parser(benchmarks)


def run(args: argparse.Namespace) -> int:
    """Run a benchmark; returns the exit status."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"matplotlib missing: {install_command('bench')}")
    from legato_lab.simulation.record import RequestError

    try:
        args.benchmark(args)
    except RequestError as error:
        print(f"legato: {error}", file=sys.stderr)
        return 1
    return 0


def _add_run_parser(benchmarks: "Subparsers") -> None:
    parser = benchmarks.add_parser(
        "run",
        help="send a workload and measure latencies",
        description="Send a workload, each request at its time, and measure latencies.",
    )
    add_server_flags(parser)
    add_workload_flags(parser)
    parser.add_argument(
        "--max-concurrency", type=count, metavar="N", help="most requests in flight"
    )
    add_slo_flags(parser)
    add_output_flags(parser)
    parser.set_defaults(benchmark=_run)


def _add_capacity_parser(benchmarks: "Subparsers") -> None:
    parser = benchmarks.add_parser(
        "capacity",
        help="find the largest rate that a server sustains",
        description="Find the largest Poisson rate at which P99 ITL and the median scheduling "
        "delay (TTFT beyond that of an idle server) keep their limits, requests finish as they "
        "arrive, and the delay does not grow. Trials begin with --rate "
        f"({FIRST_RATE_PER_S:g} a second). Behind a warm-up of a sixth of that, each is measured "
        f"for --duration ({LEAST_S:g} s, which is the least), for 20 median end-to-end times and "
        f"for --num-requests ({_TRIAL_REQUESTS}), whichever is the longest; it draws its requests "
        "from the whole workload, again where there are too few.",
    )
    add_server_flags(parser)
    add_workload_flags(parser)
    add_search_flags(parser)
    add_output_flags(parser)
    parser.set_defaults(benchmark=_capacity)


def _add_probe_parser(benchmarks: "Subparsers") -> None:
    parser = benchmarks.add_parser(
        "probe",
        help="see what long prompts do to running streams",
        description="Let streams decode, send long prompts, and see how long the streams wait.",
    )
    add_server_flags(parser)
    add_probe_flags(parser)
    add_output_flags(parser)
    parser.set_defaults(benchmark=_probe)


def _add_report_parser(benchmarks: "Subparsers") -> None:
    parser = benchmarks.add_parser(
        "report",
        help="put reports side by side",
        description="Put reports, of any servers, side by side on one page.",
    )
    parser.add_argument("reports", nargs="+", type=Path, metavar="JSON", help="written earlier")
    parser.add_argument(
        "-o", "--output", type=Path, default="report.html", metavar="HTML", help="%(default)s"
    )
    parser.set_defaults(benchmark=_report)


def _run(args: argparse.Namespace) -> None:
    from legato_lab.load.sessions import ask_model, random_prompts, run_workload
    from legato_lab.report.report_file import RunReport

    model = asyncio.run(ask_model(server_address(args)))
    choice = workload_choice(args, model.max_model_len)
    workload, notes = choice.load(), choice.notes()
    tell_notes(notes)
    prompts = asyncio.run(
        random_prompts(server_address(args), vocab_size=args.vocab_size, seed=args.seed)
    )
    records = asyncio.run(
        run_workload(server_address(args), workload, prompts, max_concurrency=args.max_concurrency)
    )
    name, slos = args.name or model.id, promised_slos(args)
    publish(args, RunReport.of(name, report_settings(args), slos, records, notes))


def _capacity(args: argparse.Namespace) -> None:
    from legato_lab.load.sessions import ask_model, random_prompts, search_capacity
    from legato_lab.report.report_file import CapacityReport

    model = asyncio.run(ask_model(server_address(args)))
    choice = trial_choice(args, model.max_model_len)
    notes = choice.notes()
    tell_notes(notes)
    prompts = asyncio.run(
        random_prompts(server_address(args), vocab_size=args.vocab_size, seed=args.seed)
    )
    capacity = search_capacity(
        server_address(args),
        choice,
        prompts,
        search_settings(args, args.itl_slo_s, _TRIAL_REQUESTS),
    )
    name = args.name or model.id
    publish(
        args,
        CapacityReport(name=name, settings=report_settings(args), capacity=capacity, notes=notes),
    )


def _probe(args: argparse.Namespace) -> None:
    from legato_lab.load.sessions import ask_model
    from legato_lab.probe import Probe
    from legato_lab.report.report_file import ProbeReport

    model = asyncio.run(ask_model(server_address(args)))
    probe = Probe(
        args.base_url,
        model.id,
        num_streams=args.streams,
        long_prompt=args.long,
        num_longs=args.longs,
        steady_s=args.steady,
        vocab_size=args.vocab_size,
        seed=args.seed,
        api_key=args.api_key,
    )
    result = asyncio.run(probe.run())
    name = args.name or model.id
    publish(args, ProbeReport(name=name, settings=report_settings(args), result=result))


def _report(args: argparse.Namespace) -> None:
    from legato.cli.table import print_table
    from legato_lab.report.page import render_page
    from legato_lab.report.report_file import read_report
    from legato_lab.report.tables import tables

    reports = [read_report(path) for path in args.reports]
    for table in tables(reports):
        print_table(table)
    args.output.write_text(render_page(reports), encoding="utf-8")
    print(f"written to {args.output}")
