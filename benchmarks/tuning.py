"""Is the tuner's pick as good as the best of an exhaustive grid on the real server?

    legato tune --workload W --rate R --num-requests N --itl-slo T --ttft-slo T -o out/tune
    python -m benchmarks tuning --tuned out/tune [the same flags] [--most N]

Runs the whole workload under the first finalist of a tuning, and under every combination of token
budgets, ways to size steps, numbers of running requests, and shedding load. What has been run
before with the same output folder is not run again, and `--most` bounds the runs of one call, so
that a grid of an hour can be had in pieces. Prints goodput and seconds of the machine.
"""

import argparse
import itertools
from pathlib import Path
from typing import cast

import msgspec

from benchmarks.runner.flags import add_seed
from benchmarks.runner.main import main
from benchmarks.runner.run import Run
from legato.cli.flags import add_engine_flags, engine_config
from legato.cli.table import Table
from legato.core.config import EngineConfig
from legato.core.slo import INTERACTIVE
from legato_lab.commands.workload_flags import add_workload_flags, workload_choice
from legato_lab.report.report_file import RunReport, read_report, write_report
from legato_lab.simulation.summary import Slos
from legato_lab.simulation.workload import RandomPrompts, Workload
from legato_lab.tune.candidate import Candidate, Steps
from legato_lab.tune.real import run_real
from legato_lab.tune.report import TuneReport
from legato_lab.tune.tables import describe

MINUTES = 55

_MAX_MODEL_LEN = 8192
_VOCAB_SIZE = 32_000
_PICK = "pick"
_HEADER = ["", "settings", "goodput, requests/s", "SLO attained", "machine, s"]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tuned", type=Path, required=True, help="folder with a tune.json")
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--seqs", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--most", type=int, help="runs of this call (default: all)")
    parser.set_defaults(out=Path("out/tuning"))
    add_seed(parser)
    add_workload_flags(parser, model_is_local=True)
    add_engine_flags(parser)


def measure(run: Run) -> None:
    flags = run.flags
    config = engine_config(flags)
    workload = workload_choice(flags, _MAX_MODEL_LEN).load()
    tuned = msgspec.json.decode((flags.tuned / "tune.json").read_bytes(), type=TuneReport)
    cells = {_PICK: tuned.finalists[0].candidate, **_grid(flags)}
    missing = [name for name in cells if not _path(flags.out, name).exists()]
    for name in missing[: flags.most]:
        write_report(run.file(f"{name}.json"), _report(config, cells[name], name, workload))
    paths = [_path(flags.out, name) for name in cells]
    reports = [cast(RunReport, read_report(path)) for path in paths if path.exists()]
    reports.sort(key=lambda report: report.summary.goodput_per_s, reverse=True)
    run.show(Table("The tuner's pick and a grid", _HEADER, [_row(report) for report in reports]))
    run.console.print(_told(reports, tuned, len(cells) - 1))
    run.write({report.name: _figures(report) for report in reports})


def _grid(flags: argparse.Namespace) -> dict[str, Candidate]:
    """Key a cell's name."""
    steps: tuple[Steps, ...] = ("slo", "fixed")
    cells = {}
    for kind, budget, seqs, sheds in itertools.product(
        steps, flags.budgets, flags.seqs, (False, True)
    ):
        cells[f"{kind}-{budget}-{seqs}-{'shed' if sheds else 'all'}"] = Candidate(
            steps=kind,
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            prefill_order="slowdown",
            shed_load=sheds,
        )
    return cells


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _report(config: EngineConfig, candidate: Candidate, name: str, workload: Workload) -> RunReport:
    goal = config.scheduler
    engine = msgspec.structs.replace(config, scheduler=candidate.configure(goal))
    served = run_real(engine, workload, RandomPrompts(vocab_size=_VOCAB_SIZE, seed=0), name)
    slos = Slos(default=goal.classes[INTERACTIVE], by_class=goal.classes)
    settings = {"candidate": describe(candidate), "machine_s": served.wall_s}
    return RunReport.of(name, settings, slos, served.records)


def _row(report: RunReport) -> list[str]:
    return [
        report.name,
        report.settings["candidate"],
        f"{report.summary.goodput_per_s:.3f}",
        f"{report.summary.attainment:.0%}",
        f"{report.settings['machine_s']:.0f}",
    ]


def _figures(report: RunReport) -> dict[str, object]:
    return {"settings": report.settings, "summary": report.summary}


def _told(reports: list[RunReport], tuned: TuneReport, num_cells: int) -> str:
    cells = [report for report in reports if report.name != _PICK]
    grid_s = sum(report.settings["machine_s"] for report in cells)
    return (
        f"grid: {len(cells)} of {num_cells} cells in {grid_s:.0f} s of the machine; tuning: "
        f"{tuned.machine_s:.0f} s of the machine, {tuned.search_s:.0f} s of simulation"
    )


if __name__ == "__main__":
    main("tuning")
