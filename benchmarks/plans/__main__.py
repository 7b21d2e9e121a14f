"""Does the scheduler plan, refuse and promise the same as another version of it?

    python -m benchmarks plans against REF [--seeds 400] [--steps 300]
    python -m benchmarks plans record FILE
    python -m benchmarks plans compare FILE FILE

Random traffic meets the real scheduler and cache on a virtual clock, by the harness of the tests:
policies, orders, promises, tenants, drafts, a draft model, scarce memory, windows, states,
transfers, faults and dropped rows. Each step is a line: what happened, the plan, the counters, the
forecast and the outputs. Lines of two versions are equal, floats bit for bit, or the first that
differs is shown. `against` records both on this machine: last bits differ between machines.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import msgspec

from benchmarks.plans.traffic import Traffic
from benchmarks.runner.checkout import HERE, environment
from benchmarks.runner.main import main
from benchmarks.runner.run import Run

MINUTES = 6


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("act", choices=("against", "record", "compare"))
    parser.add_argument("targets", nargs="+", help="a commit, a file to write, or two files")
    parser.add_argument("--seeds", type=int, default=400)
    parser.add_argument("--steps", type=int, default=300)


def measure(run: Run) -> int:
    flags = run.flags
    match flags.act, flags.targets:
        case "record", [file]:
            _record(run, Path(file), flags.seeds, flags.steps)
            return 0
        case "compare", [first, second]:
            return _compare(run, Path(first), Path(second))
        case "against", [ref]:
            return _against(run, ref)
    run.tell(f"{flags.act} takes other arguments: see --help")
    return 2


def _record(run: Run, file: Path, num_seeds: int, num_steps: int) -> None:
    encode = msgspec.json.Encoder(order="sorted", enc_hook=_plain).encode
    with file.open("wb") as lines:
        for seed in run.track(range(num_seeds), "seeds", total=num_seeds):
            for line in Traffic(seed).lines(num_steps):
                lines.write(b"%d %b\n" % (seed, encode(line)))


def _plain(value: object) -> object:
    """Anything else in a line, by its fields."""
    fields = getattr(value, "__dict__", None)
    return repr(value) if fields is None else fields


def _compare(run: Run, first: Path, second: Path) -> int:
    """Show the first line that differs; return 1 if there is one."""
    number = 0
    for number, (one, other) in enumerate(zip_longest(_lines(first), _lines(second)), 1):
        if one != other:
            run.console.print(f"line {number} differs:\n{first}: {one}\n{second}: {other}")
            return 1
    run.console.print(f"{number} lines, 0 differences")
    return 0


def _lines(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8") as lines:
        yield from (line.rstrip("\n") for line in lines)


def _against(run: Run, ref: str) -> int:
    """Record another commit and this tree, and compare them."""
    checkout = run.file("plans-checkout").resolve()
    _remove(checkout)
    subprocess.run(
        ["git", "worktree", "add", "--quiet", "--detach", str(checkout), ref], cwd=HERE, check=True
    )
    try:
        files = [
            _recorded(run, checkout, run.file("plans-there.jsonl").resolve()),
            _recorded(run, HERE, run.file("plans-here.jsonl").resolve()),
        ]
    finally:
        _remove(checkout)
    return _compare(run, *files)


def _recorded(run: Run, checkout: Path, file: Path) -> Path:
    words = ["-m", "benchmarks", "plans", "record", str(file)]
    sizes = ["--seeds", str(run.flags.seeds), "--steps", str(run.flags.steps)]
    with run.status(f"recording {checkout.name}"):
        subprocess.run(
            [sys.executable, *words, *sizes],
            cwd=checkout,
            env=environment(checkout, run.flags.out),
            check=True,
        )
    return file


def _remove(checkout: Path) -> None:
    shutil.rmtree(checkout, ignore_errors=True)
    subprocess.run(["git", "worktree", "prune"], cwd=HERE, check=True)


if __name__ == "__main__":
    main("plans")
