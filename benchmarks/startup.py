"""What the time from `legato serve` to the first token is made of.

    python -m benchmarks.startup [--runs 5] [--first] [-- FLAGS OF THE SERVER]

Starts the real server again and again, with the calibration of an earlier start on disk and, with
`--first`, also without one, as on a machine's first start ever. Prints the median seconds of each
part, as the server logs them, and the processor time of all its processes.
"""

import argparse
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

_ENGINE = re.compile(r"the engine is ready after ([\d.]+) s: (.*)")
_TEXT = re.compile(r"the tokenizer is loaded after ([\d.]+) s")
_URL = re.compile(r"Legato serves \S+ on (\S+)")
_TOTALS = ("tokenizer", "ready", "first token", "processor time")
_TIMEOUT_S = 300.0


def main() -> None:
    args = _parser().parse_args()
    flags = [flag for flag in args.flags if flag != "--"]
    with tempfile.TemporaryDirectory() as folder:
        kept = ["--calibration-dir", str(Path(folder, "kept")), *flags]
        started(kept)  # calibrates, and reads the files from the disk
        columns = {"later starts": [started(kept) for _ in range(args.runs)]}
        if args.first:
            columns["first start"] = [
                started(["--calibration-dir", str(Path(folder, str(run))), *flags])
                for run in range(args.runs)
            ]
    Console().print(_table(columns))


def started(flags: list[str]) -> dict[str, float]:
    """One start: seconds of each part, and to the first token."""
    before, began_s = _processor_s(), time.monotonic()
    command = [sys.executable, "-m", "legato", "serve", "--port", "0", *flags]
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
                    raise SystemExit(f"the server did not start:\n{log.read()}")
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


def _table(columns: dict[str, list[dict[str, float]]]) -> Table:
    table = Table("seconds", *columns, title="From `legato serve` to the first token")
    rows: defaultdict[str, list[str]] = defaultdict(list)
    names = list(next(iter(columns.values()))[0])
    engine_parts = [name for name in names if name.startswith("  ")]
    for name in ("engine", *engine_parts, *_TOTALS):
        for runs in columns.values():
            rows[name].append(f"{statistics.median(run[name] for run in runs):.2f}")
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=5, help="%(default)s")
    parser.add_argument("--first", action="store_true", help="also without a calibration on disk")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="of the server, behind --")
    return parser


if __name__ == "__main__":
    main()
