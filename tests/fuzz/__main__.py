"""Fuzz for as long as told, and print what came of it: `python -m tests.fuzz --seconds 600`.

Each part takes as long: clients of a server with small limits; large bodies; changes of settings
under running streams; answers of all sizes; pipelines, over one connection or several; floods by
tenants of a server that sheds load; stopped and killed processes; a system clock that is set
forward and back; too little memory; broken checkpoints; files that ask for much memory; and native
kernels under sanitizers. Beside each request, a stream and /health are watched. A server fails that
delays them, answers with 5xx, logs a traceback or keeps memory. `--only large --seed 17 --tries 1`
runs a case again.
"""

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from transformers.utils import logging

from tests.api.launch import ServerProcess, running_server
from tests.fuzz import answers, pipelines
from tests.fuzz.checkpoints import Seeds, memory_limit, try_one
from tests.fuzz.clients import FLAGS, attack
from tests.fuzz.clock import has_compiler, shift_clock, shiftable_clock
from tests.fuzz.floods import FLOOD_FLAGS, flood
from tests.fuzz.hostile import ROOM_BYTES, HostileSeeds, try_hostile
from tests.fuzz.large import overwhelm
from tests.fuzz.native_kernels import (
    CASES_A_RUN,
    compile_harness,
    failure_of,
    sanitized_instructions,
)
from tests.fuzz.openapi import check_answers
from tests.fuzz.report import failures_of, print_told, print_watched
from tests.fuzz.settings import change_settings
from tests.fuzz.starved import starve
from tests.fuzz.stopped import stop_processes
from tests.fuzz.watched import Attempt, attack_watched

_LARGE_FLAGS = ("--max-num-seqs", "8")
"""Few, so that the requests of hostile clients alone do not make each step slow."""
_WIDTH = 160  # of what goes into a file

Part = Callable[[argparse.Namespace, Path, Console], list[str]]
"""Fuzzes for a while; returns the failures."""


def main() -> int:
    args = _parse()
    logging.set_verbosity_error()
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    failures: list[str] = []
    for name in args.only or _PARTS:
        with tempfile.TemporaryDirectory() as folder:
            failures += _PARTS[name](args, Path(folder), console)
    for failure in failures:
        console.print(failure, markup=False, style="red")
    console.print(f"{len(failures)} failures")
    return 1 if failures else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="%(default)g")
    parser.add_argument("--seed", type=int, default=0, help="of the first try (%(default)s)")
    parser.add_argument("--tries", type=int, help="most of each part")
    parser.add_argument("--only", action="append", choices=_PARTS, help="may be repeated")
    parser.add_argument(
        "--examples",
        type=int,
        default=100,
        help="of each operation of the OpenAPI document, right and wrong ones (%(default)s)",
    )
    return parser.parse_args()


def _clients(args: argparse.Namespace, folder: Path, console: Console) -> list[str]:
    return _watched("clients", FLAGS, _attack, args, folder, console)


def _large(args: argparse.Namespace, folder: Path, console: Console) -> list[str]:
    return _watched("large", _LARGE_FLAGS, overwhelm, args, folder, console)


def _floods(args: argparse.Namespace, folder: Path, console: Console) -> list[str]:
    return _watched("floods", FLOOD_FLAGS, flood, args, folder, console)


def _settings(args: argparse.Namespace, folder: Path, console: Console) -> list[str]:
    return _watched("settings", _LARGE_FLAGS, change_settings, args, folder, console)


def _answers(args: argparse.Namespace, folder: Path, console: Console) -> list[str]:
    return _watched("answers", answers.FLAGS, answers.ask, args, folder, console)


def _pipelines(args: argparse.Namespace, folder: Path, console: Console) -> list[str]:
    attempt = pipelines.send_pipelines
    return _watched("pipelines", pipelines.FLAGS, attempt, args, folder, console)


def _document(args: argparse.Namespace, folder: Path, console: Console) -> list[str]:
    """The OpenAPI document, which is true or not."""
    with running_server(folder, *FLAGS) as server:
        try:
            print_told("document", check_answers(server, args.examples), console)
        except (Exception, BaseExceptionGroup) as error:  # schemathesis groups what it found
            return [f"the OpenAPI document: {error!r}"]
        log = server.log.read_text()
    return [log] if "Traceback" in log else []


def _checkpoints(args: argparse.Namespace, folder: Path, console: Console) -> list[str]:
    told: Counter[str] = Counter()
    failures = []
    end_s = time.monotonic() + _seconds(args)
    with memory_limit():
        seeds = Seeds(folder)
        for seed in _seeds(args):
            if time.monotonic() > end_s:
                break
            try:
                told += try_one(seeds, random.Random(seed), folder)
            except Exception as error:
                failures.append(f"checkpoints, seed {seed}: {type(error).__name__}: {error}")
    print_told("checkpoints", told, console)
    return failures


def _native(args: argparse.Namespace, folder: Path, console: Console) -> list[str]:
    sets = sanitized_instructions()
    programs = [compile_harness(name, folder) for name in sets]
    told: Counter[str] = Counter()
    failures = []
    end_s = time.monotonic() + _seconds(args)
    for seed in itertools.islice(itertools.count(args.seed, CASES_A_RUN), args.tries):
        if time.monotonic() > end_s:
            break
        for name, program in zip(sets, programs, strict=True):
            told[name] += CASES_A_RUN
            if failure := failure_of(program, seed, CASES_A_RUN):
                failures.append(f"native, {name}: {failure}")
    print_told("native", told, console)
    return failures


def _files(args: argparse.Namespace, folder: Path, console: Console) -> list[str]:
    told: Counter[str] = Counter()
    failures = []
    end_s = time.monotonic() + _seconds(args)
    seeds = HostileSeeds(folder)
    for seed in _seeds(args):
        if time.monotonic() > end_s:
            break
        try:
            with memory_limit(ROOM_BYTES):
                told += try_hostile(seeds, random.Random(seed), folder)
        except Exception as error:
            failures.append(f"files, seed {seed}: {type(error).__name__}: {error}")
    print_told("files", told, console)
    return failures


def _stopped(args: argparse.Namespace, folder: Path, console: Console) -> list[str]:
    found = stop_processes(_seeds(args), _seconds(args), folder)
    print_told("stopped", found.told, console)
    console.print(
        f"longest case {found.longest_s:.1f} s; /health was delayed by at most "
        f"{1000 * found.health_s:.0f} ms, the stream by {1000 * found.stream_s:.0f} ms"
    )
    return [f"stopped: {failure}" for failure in found.failures]


def _clock(args: argparse.Namespace, folder: Path, console: Console) -> list[str]:
    if not has_compiler():
        console.print("clock: left out, since there is no C compiler")
        return []
    with shiftable_clock(folder) as clock:
        return _watched("clock", (), partial(shift_clock, clock), args, folder, console)


def _starved(args: argparse.Namespace, folder: Path, console: Console) -> list[str]:
    found = starve(_seeds(args), _seconds(args), folder)
    if found is None:
        console.print("starved: left out, since no memory cgroup can be made here")
        return []
    print_told("starved", found.told, console)
    console.print(f"a server that has all it wants takes {found.needed_bytes >> 20} MiB")
    return [f"starved: {failure}" for failure in found.failures]


_PARTS: dict[str, Part] = {
    "clients": _clients,
    "large": _large,
    "settings": _settings,
    "answers": _answers,
    "pipelines": _pipelines,
    "floods": _floods,
    "document": _document,
    "checkpoints": _checkpoints,
    "native": _native,
    "files": _files,
    "stopped": _stopped,
    "clock": _clock,
    "starved": _starved,
}


def _watched(
    name: str,
    flags: Sequence[str],
    attempt: Attempt,
    args: argparse.Namespace,
    folder: Path,
    console: Console,
) -> list[str]:
    with console.status(f"{name}: starting") as status:
        found = attack_watched(
            flags,
            attempt,
            _seeds(args),
            _seconds(args),
            folder,
            lambda case: status.update(f"{name}, seed {case.seed}: {case.kind}"),
        )
    print_watched(name, found, console)
    return failures_of(name, found)


def _attack(server: ServerProcess, seed: int) -> tuple[str, Counter[str]]:
    ((told, count),) = attack(server, random.Random(seed)).items()
    client, answer = told.split()
    return client, Counter({answer: count})


def _seeds(args: argparse.Namespace) -> Iterable[int]:
    return itertools.islice(itertools.count(args.seed), args.tries)


def _seconds(args: argparse.Namespace) -> float:
    """Of each part that takes as long as it is let."""
    timed = set(args.only or _PARTS) - {"document"}
    return float(args.seconds) / max(1, len(timed))


if __name__ == "__main__":
    sys.exit(main())
