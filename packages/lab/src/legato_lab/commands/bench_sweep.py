"""`legato bench sweep`: the same workload under one load after another."""

import argparse
import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from legato.cli.values import counts, rates
from legato.core.errors import ConfigError
from legato_lab.commands.bench_flags import (
    add_output_flags,
    add_server_flags,
    add_slo_flags,
    promised_slos,
    server_address,
)
from legato_lab.commands.bench_reports import publish, report_path, report_settings
from legato_lab.commands.workload_flags import add_workload_flags, tell_notes, workload_choice

if TYPE_CHECKING:
    from legato_lab.report.report_file import SweepReport
    from legato_lab.workload.notes import WorkloadNotes

_LOADS = ("rates", "concurrencies")


def add_sweep_parser(benchmarks: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = benchmarks.add_parser(
        "sweep",
        help="latency over throughput, at several loads",
        description="Send a workload at several rates, or with several numbers of requests in "
        "flight, one after the other, and draw latency over throughput. Each load lasts for "
        "--duration (60 s), or has --num-requests.",
    )
    add_server_flags(parser)
    _add_load_flags(parser)
    add_workload_flags(parser)
    add_slo_flags(parser)
    add_output_flags(parser)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with what an earlier call with the same flags has written",
    )
    parser.set_defaults(benchmark=_sweep)


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("loads").add_mutually_exclusive_group(required=True)
    group.add_argument("--rates", type=rates, metavar="R,R,...", help="requests a second")
    group.add_argument(
        "--concurrencies",
        type=counts,
        metavar="N,N,...",
        help="requests in flight: when one ends, the next is sent",
    )


def _sweep(args: argparse.Namespace) -> None:
    from legato_lab.load.sessions import ask_model, random_prompts
    from legato_lab.load.sweep_points import measure_points
    from legato_lab.report.console import print_point
    from legato_lab.report.report_file import write_report

    if args.rate is not None:
        raise ConfigError("a sweep has --rates or --concurrencies, and no --rate")
    address = server_address(args)
    model = asyncio.run(ask_model(address))
    prompts = asyncio.run(random_prompts(address, vocab_size=args.vocab_size, seed=args.seed))
    choice = workload_choice(args, model.max_model_len)
    notes = choice.notes()
    tell_notes(notes)
    report = _begun(args, args.name or model.id, notes)
    done = {point.load for point in report.points}
    loads = [load for load in args.rates or args.concurrencies if load not in done]
    path = report_path(args, report.name)
    for load, records in measure_points(address, choice, prompts, report.load_kind, loads):
        point = report.point(load, promised_slos(args), records)
        report = report.with_point(point)
        write_report(path, report)
        print_point(point, report.load_kind.describe(load))
    publish(args, report)


def _begun(args: argparse.Namespace, name: str, notes: "WorkloadNotes") -> "SweepReport":
    """Return the report to continue, without points unless an earlier one is resumed.

    Raises:
        ConfigError: the earlier report is of another sweep.
    """
    from legato_lab.report.report_file import SweepReport, read_report
    from legato_lab.sweep import LoadKind

    kind = LoadKind.RATE if args.rates else LoadKind.CONCURRENCY
    report = SweepReport(
        name=name, settings=report_settings(args), load_kind=kind, points=[], notes=notes
    )
    path = report_path(args, name)
    if not args.resume or not path.exists():
        return report
    found = read_report(path)
    if not isinstance(found, SweepReport) or _fixed(found) != _fixed(report):
        raise ConfigError(f"{path} is of a sweep with other flags, and cannot be resumed")
    return msgspec.structs.replace(report, points=found.points)


def _fixed(report: "SweepReport") -> dict[str, Any]:
    """Return the settings common to all points, as JSON values."""
    fixed = {name: value for name, value in report.settings.items() if name not in _LOADS}
    plain: dict[str, Any] = msgspec.to_builtins({**fixed, "load_kind": report.load_kind})
    return plain
