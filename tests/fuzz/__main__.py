"""Fuzz for as long as told, and print what came of it: `python -m tests.fuzz --seconds 120`."""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from tests.fuzz.checkpoints import Seeds, memory_limit, try_one
from tests.fuzz.clients import FLAGS, attack
from tests.fuzz.openapi import check_answers
from tests.server.launch import running_server

Try = Callable[[random.Random], Counter[str]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="%(default)g, half for each")
    parser.add_argument("--seed", type=int, default=0, help="of the first try (%(default)s)")
    parser.add_argument(
        "--examples",
        type=int,
        default=100,
        help="of each operation of the OpenAPI document, right and wrong ones (%(default)s)",
    )
    args = parser.parse_args()
    logging.set_verbosity_error()
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running_server(folder, *FLAGS) as server:
            told = _repeat(lambda rng: attack(server, rng), args.seed, args.seconds / 2, failures)
            try:
                told += check_answers(server, args.examples)
            except Exception as error:
                failures.append(f"the OpenAPI document: {error}")
            server.wait_for_metric("num_requests_running", 0)
            if "Traceback" in server.log.read_text():
                failures.append(server.log.read_text())
        with memory_limit():
            seeds = Seeds(folder)
            told += _repeat(
                lambda rng: try_one(seeds, rng, folder), args.seed, args.seconds / 2, failures
            )
    _print(told, failures)
    return 1 if failures else 0


def _repeat(attempt: Try, seed: int, seconds: float, failures: list[str]) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        try:
            outcomes += attempt(random.Random(seed))
        except Exception as error:
            failures.append(f"seed {seed}: {type(error).__name__}: {error}")
        seed += 1
    return outcomes


def _print(outcomes: Counter[str], failures: list[str]) -> None:
    table = Table("what", "came of it", "times", title=f"{outcomes.total()} tries")
    for name, count in sorted(outcomes.items()):
        table.add_row(*name.rsplit(maxsplit=1), str(count))
    console = Console()
    console.print(table)
    for failure in failures[:20]:
        console.print(failure, markup=False, style="red")
    console.print(f"{len(failures)} failures")


if __name__ == "__main__":
    sys.exit(main())
