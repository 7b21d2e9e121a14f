"""What is the time from `legato serve` to the first token made of?

    python -m benchmarks startup [--rounds 5] [--first] [flags of `legato serve`]

Starts the real server again and again, with the calibration of an earlier start on disk and, with
`--first`, in turn without one, as on a machine's first start ever. Prints the median seconds of
each part, as the server logs them, and the processor time of all its processes.
"""

import argparse
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.runner.flags import add_rounds, add_server_flags
from benchmarks.runner.main import main
from benchmarks.runner.rounds import turns
from benchmarks.runner.run import Run
from legato.cli.table import Table
from legato.core.errors import ConfigError

MINUTES = 1

_ENGINE = re.compile(r"the engine is ready after ([\d.]+) s: (.*)")
_TEXT = re.compile(r"the tokenizer is loaded after ([\d.]+) s")
_URL = re.compile(r"Legato serves \S+ on (\S+)")
_TOTALS = ("tokenizer", "ready", "first token", "processor time")
_TIMEOUT_S = 300.0
_LATER, _FIRST = "later starts", "first start"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser, 5, "--runs", help="starts of each kind")
    parser.add_argument("--first", action="store_true", help="also without a calibration on disk")
    add_server_flags(parser)


def measure(run: Run) -> None:
    flags = run.flags
    kinds = [_LATER, _FIRST] if flags.first else [_LATER]
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        started(folder, _LATER, flags.server_flags)  # calibrates, and reads the files from the disk
        for number, kind in turns(kinds, flags.rounds):
            with run.status(f"{kind}, {number + 1} of {flags.rounds}"):
                place = _LATER if kind == _LATER else f"{kind} {number}"
                found[kind].append(started(folder, place, flags.server_flags))
    run.show(_table(found))
    run.write(found)


def started(folder: str, place: str, flags: list[str]) -> dict[str, float]:
    """One start: seconds of each part, and to the first token.

    Args:
        place: in the folder, where a calibration is kept.
    """
    before, began_s = _processor_s(), time.monotonic()
    kept = ("--calibration-dir", str(Path(folder, place)))
    command = [sys.executable, "-m", "legato", "serve", "--port", "0", *kept, *flags]
    with tempfile.TemporaryFile("w+") as log:
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=log, text=True) as server:
            try:
                assert server.stdout is not None
                url = next(
                    (found[1] for line in server.stdout if (found := _URL.match(line))), None
                )
                if url is None:
                    log.seek(0)
                    raise ConfigError(f"the server did not start:\n{log.read()}")
                seconds = {"ready": time.monotonic() - began_s}
                body = {"prompt": "Once upon a time", "max_tokens": 1}
                httpx.post(
                    f"{url}/v1/completions", json=body, timeout=_TIMEOUT_S
                ).raise_for_status()
                seconds["first token"] = time.monotonic() - began_s
            finally:
                server.terminate()
        log.seek(0)
        seconds |= _parts(log.read())
    seconds["processor time"] = _processor_s() - before
    return seconds


def _parts(log: str) -> dict[str, float]:
    engine, text = _ENGINE.search(log), _TEXT.search(log)
    assert engine is not None, log
    assert text is not None, log
    parts = {"engine": float(engine[1]), "tokenizer": float(text[1])}
    for part in engine[2].split(", "):
        name, _, seconds = part.rpartition(" ")
        parts[f"  {name}"] = float(seconds)
    return parts


def _processor_s() -> float:
    """Of all processes that were started from here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _table(found: dict[str, list[dict[str, float]]]) -> Table:
    parts = next(iter(found.values()))[0]
    names = ("engine", *(name for name in parts if name.startswith("  ")), *_TOTALS)
    rows = [
        [name, *(f"{statistics.median(run[name] for run in runs):.2f}" for runs in found.values())]
        for name in names
    ]
    return Table("From `legato serve` to the first token, in seconds", ["", *found], rows)


if __name__ == "__main__":
    main("startup")
