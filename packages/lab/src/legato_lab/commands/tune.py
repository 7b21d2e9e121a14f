"""`legato tune`: find the settings of a server for a workload and its SLOs."""

import argparse
import importlib.util
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from legato.cli.flags import add_engine_flags, engine_config, given_fields
from legato.cli.values import count, duration_s, whole
from legato.core.config import SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.version import install_command
from legato_lab.commands.bench_flags import add_output_flag, add_prompt_flags
from legato_lab.commands.bench_reports import report_settings
from legato_lab.commands.fleet_flags import add_link_flags, link
from legato_lab.commands.simulate_flags import add_acceptance_flag, told_acceptance
from legato_lab.commands.workload_flags import add_workload_flags, tell_notes, workload_choice
from legato_lab.load.ending import closing_when_ended

if TYPE_CHECKING:
    from legato_lab.tune.report import TuneReport
    from legato_lab.tune.tuning import TuneConfig

_EXTRA_MODULES = ("matplotlib", "optuna")
_NOT_SETTINGS = {"run", "output"}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "tune",
        help="find the settings of a server for a workload and its SLOs",
        description="Measure the machine, search settings in simulation for the highest goodput, "
        "verify the best ones on the machine, and print the flags of `legato serve`. Settings of "
        "the scheduler that are given here are not searched.",
    )
    add_workload_flags(parser, model_is_local=True)
    add_engine_flags(parser)
    _add_tuning_flags(parser)
    _add_fleet_flags(parser.add_argument_group("fleet"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Tune, print the result and write it as JSON and as a page; returns the exit status."""
    missing = [name for name in _EXTRA_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} missing: {install_command('tune')}")
    from rich.console import Console

    from legato_lab.tune.tuning import tune, tuned_context

    logging.basicConfig(level=logging.ERROR)
    config = _tune_config(args)
    choice = workload_choice(args, tuned_context(config))
    workload, notes = choice.load(), choice.notes()
    tell_notes(notes)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with closing_when_ended():
        tuned = tune(config, workload, report_settings(args, _NOT_SETTINGS), console.print, notes)
    _publish(args.output, tuned)
    return 0


def _add_tuning_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tuning")
    group.add_argument(
        "--trials", type=count, default=96, metavar="N", help="candidates to simulate (%(default)s)"
    )
    group.add_argument(
        "--finalists",
        type=whole,
        default=2,
        metavar="N",
        help="candidates to run on the machine; 0 trusts the simulation (%(default)s)",
    )
    for name, default, what in (
        ("record", "45s", "to learn the machine from"),
        ("verify", "60s", "to run each finalist with"),
    ):
        group.add_argument(
            f"--{name}-duration",
            type=duration_s,
            default=default,
            metavar="TIME",
            help=f"how much of the workload {what} (%(default)s)",
        )
    group.add_argument(
        "--machine",
        metavar="NAME|FILE",
        help="a profile, instead of measuring the machine: machine.json of an earlier tuning, what "
        "`legato calibrate -o` wrote, or one that `legato simulate --profile` knows",
    )
    add_acceptance_flag(group)
    group.add_argument(
        "--processes",
        type=count,
        default=os.cpu_count() or 1,
        metavar="N",
        help="that simulate (%(default)s)",
    )
    add_prompt_flags(group, vocab_size=32_000)
    add_output_flag(group)


def _add_fleet_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--replicas",
        type=count,
        default=1,
        metavar="N",
        help="machines that share the workload behind a router; which of them should compute "
        "prompts and which generate is simulated, too (%(default)s)",
    )
    add_link_flags(group)


def _tune_config(args: argparse.Namespace) -> "TuneConfig":
    from legato_lab.tune.splits import Fleet
    from legato_lab.tune.tuning import TuneConfig

    return TuneConfig(
        engine=engine_config(args),
        given=given_fields(args, SchedulerConfig),
        num_trials=args.trials,
        num_finalists=args.finalists,
        record_s=args.record_duration,
        verify_s=args.verify_duration,
        machine=args.machine,
        acceptance=told_acceptance(args),
        vocab_size=args.vocab_size,
        num_processes=args.processes,
        seed=args.seed,
        fleet=Fleet(
            num_replicas=args.replicas,
            link=link(args),
            kv_token_bytes=args.kv_token_bytes or _kv_token_bytes(args.machine),
        ),
        output=args.output,
    )


def _kv_token_bytes(machine: str | None) -> float | None:
    from legato_lab.simulation.profiles import load_profile

    return None if machine is None else load_profile(machine).kv_token_bytes


def _publish(folder: Path, report: "TuneReport") -> None:
    from legato.cli.table import print_table
    from legato.core.serve_flags import command_line
    from legato_lab.report.page import render
    from legato_lab.report.report_file import write_report
    from legato_lab.tune.plots import tune_plots
    from legato_lab.tune.splits import best_split, verdict
    from legato_lab.tune.tables import certainty, tune_tables

    tables = tune_tables(report)
    for table in tables:
        print_table(table)
    best = report.finalists[0]
    advice = {
        "recommended": command_line(best.flags),
        "how sure": certainty(report),
        "effort": f"{report.machine_s:.0f} s on the real engine, {report.search_s:.0f} s of "
        f"simulation: {report.num_trials} trials of {report.space_size:,} candidates",
    }
    if report.splits:
        advice["split"] = f"{best_split(report.splits)}. {verdict(report.splits)}"
    write_report(folder / "tune.json", report)
    texts = [("Recommendation", advice), ("Settings", report.settings)]
    page = folder / "tune.html"
    page.write_text(render("legato tune", tables, tune_plots(report), texts), encoding="utf-8")
    print(*advice.values(), sep="\n")
    print(f"written to {page}, and as JSON beside it")
