"""From a command line to a run of a benchmark.

A benchmark is a module with `MINUTES`, `add_flags(parser)` and `measure(run)`, which returns the
exit status, or None for success.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from benchmarks.runner.catalog import Benchmark, benchmark
from benchmarks.runner.flags import SERVER_FLAGS, add_out
from benchmarks.runner.run import Run
from legato.core.errors import ConfigError
from legato_lab.load.ending import closing_when_ended
from legato_lab.simulation.record import RequestError


def main(name: str) -> NoReturn:
    """Run a benchmark with the flags of this process, which is `python -m benchmarks.NAME`."""
    sys.exit(run(benchmark(name), sys.argv[1:]))


def run(chosen: Benchmark, words: Sequence[str]) -> int:
    """Run it, and return its exit status."""
    # By its own name, so that processes that it starts find what it sends them.
    module = import_module(chosen.module)
    flags = read_flags(chosen, module.__doc__ or "", module.add_flags, words)
    measuring = Run(chosen, flags)
    try:
        with closing_when_ended():
            status: int | None = module.measure(measuring)
    except (ConfigError, RequestError) as error:
        print(f"{chosen.name}: {error}", file=sys.stderr)
        return 1
    if measuring.paths:
        print(f"written: {', '.join(map(str, dict.fromkeys(measuring.paths)))}")
    return status or 0


def read_flags(
    chosen: Benchmark,
    description: str,
    add_flags: Callable[[argparse.ArgumentParser], None],
    words: Sequence[str],
) -> argparse.Namespace:
    """Read a benchmark's flags, and those of all benchmarks."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {chosen.name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_out(parser)
    add_flags(parser)
    flags, others = parser.parse_known_args(words)
    others = [word for word in others if word != "--"]
    if others and not hasattr(flags, SERVER_FLAGS):
        parser.error(f"unknown: {' '.join(others)}")
    if others:
        setattr(flags, SERVER_FLAGS, others)
    return flags
