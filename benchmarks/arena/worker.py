"""Simulates cases in several processes; also as a program, with the engine of another checkout.

python -m benchmarks.arena.worker WORK FIGURES JOBS
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.arena.case import Case
from benchmarks.arena.outcome import Outcome
from benchmarks.arena.simulation import run
from benchmarks.arena.slowdown import Slowdown, SlowdownRun, measure

Track = Callable[[Iterable[Any], str, int], Iterator[Any]]
"""Shows how many of some items are done."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What one version of the engine is to simulate."""

    cases: list[Case] = []
    slowdowns: list[SlowdownRun] = []


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it, in the same order; None for an order that a version does not have."""

    outcomes: list[Outcome] = []
    slowdowns: list[Slowdown | None] = []


def simulated(work: Work, num_jobs: int, track: Track) -> Figures:
    """Simulate all, in so many processes."""
    with ProcessPoolExecutor(num_jobs, initializer=quieten) as pool:
        outcomes = pool.map(run, work.cases)
        slowdowns = pool.map(measure, work.slowdowns)
        return Figures(
            outcomes=[*track(outcomes, "cases", len(work.cases))],
            slowdowns=[*track(slowdowns, "slowdowns", len(work.slowdowns))],
        )


def quieten() -> None:
    """Log no warnings: promises are broken on purpose."""
    logging.disable(logging.ERROR)


def main(work: str, figures: str, num_jobs: str) -> None:
    known = msgspec.json.decode(Path(work).read_bytes(), type=Work)
    found = simulated(known, int(num_jobs), lambda items, *_: iter(items))
    Path(figures).write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
