"""How long do requests wait in floods, which promises are kept, and which tenants pay?

    python -m benchmarks arena [--only a1,a5,7b/shed] [--against REV] [--seconds 60]
    python -m benchmarks arena --slowdown TRACE ... [--loads 0.5,0.8,0.95] [--shape 7b]

Pure simulation: the engine's loop and scheduler on a virtual clock, with steps that last by stated
costs, perturbed and noisy where the machine is one of the four shapes. Cases a1 to a12 are those of
issue 58, each with the figures that it quotes. The others are floods by one or several tenants
beside light ones. `--only` takes parts of names: the words of one part, between slashes, must all
be in a name. `--against` runs the same cases with another commit's engine, and shows its figures
first.
"""

import argparse
import logging
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.arena.adversaries import adversaries
from benchmarks.arena.issue_cases import issue_cases
from benchmarks.arena.outcome import Outcome
from benchmarks.arena.slowdown import add_slowdown_flags, slowdown_runs
from benchmarks.arena.tables import case_table, flood_table, slowdown_tables, summary_table
from benchmarks.arena.worker import Figures, Work, simulated
from benchmarks.runner.checkout import HERE, environment
from benchmarks.runner.flags import add_seconds
from benchmarks.runner.main import main
from benchmarks.runner.run import Run

MINUTES = 8

_WORKERS = 2


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", metavar="NAMES", help="parts of names, by commas")
    parser.add_argument("--against", metavar="REV", help="a commit to compare with")
    parser.add_argument("--jobs", type=int, default=_WORKERS, help="processes (%(default)s)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="a field of SchedulerConfig for all cases, where a version has it",
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    add_seconds(parser, 60.0, help="that a flood lasts, simulated")
    add_slowdown_flags(parser)


def measure(run: Run) -> int:
    flags = run.flags
    logging.disable(logging.ERROR)  # of promises that are broken on purpose
    work = _work(run)
    if flags.list:
        for case in work.cases:
            run.console.print(f"{case.name:24} {case.issue}")
        return 0
    if not work.cases and not work.slowdowns:
        run.tell(f"no case has {flags.only!r} in its name: see --list")
        return 2
    there = None if flags.against is None else _of_commit(run, work, flags.against)
    here = simulated(work, flags.jobs, run.track)
    _show(run, work, there, here)
    run.write({"here": here, "there": there, "against": flags.against})
    return 0


def _work(run: Run) -> Work:
    flags = run.flags
    if flags.slowdown:
        return Work(slowdowns=slowdown_runs(flags))
    settings = {}
    for pair in flags.set:
        name, _, value = pair.partition("=")
        settings[name] = msgspec.json.decode(value)
    cases = [
        msgspec.structs.replace(case, settings={**case.settings, **settings})
        for case in (*issue_cases(), *adversaries(flags.seconds))
        if _is_chosen(case.name, flags.only)
    ]
    return Work(cases=cases)


def _is_chosen(name: str, only: str) -> bool:
    words = set(name.replace("/", " ").split())
    parts = [set(part.replace("/", " ").split()) for part in only.split(",") if part.strip()]
    return not parts or any(part <= words for part in parts)


def _of_commit(run: Run, work: Work, ref: str) -> Figures:
    """Simulate with the engine of another commit; cases and clients are this tree's."""
    checkout, told, figures = (
        (run.flags.out / name).resolve()
        for name in ("arena-checkout", "arena-work.json", "arena-there.json")
    )
    told.parent.mkdir(parents=True, exist_ok=True)
    told.write_bytes(msgspec.json.encode(work))
    _remove(checkout)
    subprocess.run(
        ["git", "worktree", "add", "--quiet", "--detach", str(checkout), ref], cwd=HERE, check=True
    )
    words = ["-m", "benchmarks.arena.worker", str(told), str(figures), str(run.flags.jobs)]
    try:
        with run.status(f"simulating {ref}"):
            subprocess.run(
                [sys.executable, *words],
                cwd=HERE,
                env=environment(checkout, run.flags.out),
                check=True,
            )
    finally:
        _remove(checkout)
    return msgspec.json.decode(figures.read_bytes(), type=Figures)


def _remove(checkout: Path) -> None:
    shutil.rmtree(checkout, ignore_errors=True)
    subprocess.run(["git", "worktree", "prune"], cwd=HERE, check=True)


def _show(run: Run, work: Work, there: Figures | None, here: Figures) -> None:
    before: Sequence[Outcome | None] = [None] * len(here.outcomes)
    if there is not None:
        before = there.outcomes
    rows = [*zip(work.cases, before, here.outcomes, strict=True)]
    if cases := [row for row in rows if row[0].issue]:
        run.show(case_table(cases))
    if floods := [row for row in rows if not row[0].issue]:
        run.show(flood_table(floods))
        run.show(summary_table(floods))
    for table in slowdown_tables(here.slowdowns, None if there is None else there.slowdowns):
        run.show(table)


if __name__ == "__main__":
    main("arena")
