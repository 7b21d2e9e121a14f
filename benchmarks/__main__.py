"""Runs a benchmark, or lists them.

python -m benchmarks NAME [flags of the benchmark]
python -m benchmarks --list
"""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.runner.catalog import benchmarks
from benchmarks.runner.main import run

_LINE = "{:<20}{:>4} min  {}"
"""Name, minutes on two cores, about, and question."""


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run a benchmark.")
    known = {benchmark.name: benchmark for benchmark in benchmarks()}
    parser.add_argument("--list", action="store_true", help="say what each measures")
    parser.add_argument("name", nargs="?", choices=known, metavar="NAME", help="one of --list")
    arguments = parser.parse_args(words[:1])
    if arguments.name is not None:
        return run(known[arguments.name], words[1:])
    if not arguments.list:
        parser.error("name a benchmark, or --list them")
    for one in known.values():
        print(_LINE.format(one.name, f"{one.minutes:g}", one.question))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
