"""Runs parts one after the other, each in a process of its own, and keeps what each found."""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.gpu.clock import sm_clock_mhz
from benchmarks.gpu.figures import UNENDED, Figures, PartFailedError, Report
from benchmarks.gpu.settings import Settings

PARTS = {
    "ceilings": 60.0,
    "steps": 150.0,
    "batch": 90.0,
    "streams": 150.0,
    "correctness": 180.0,
    "attention": 60.0,
    "experts": 60.0,
    "products": 60.0,
    "sampling": 60.0,
    "static": 90.0,
    "transformers": 120.0,
    "servers": 480.0,
    "fp8": 90.0,
    "fp8_exact": 90.0,
    "int4": 90.0,
}
"""Key the name, value the seconds after which it is given up. What later parts need goes first."""

QUICK = "quick"
GROUPS = {
    QUICK: ("ceilings", "steps", "batch", "fp8", "fp8_exact", "static", "streams"),
    "peers": ("static", "transformers", "servers"),
}
"""Parts by the name of a group, the part of most worth first."""

_FEWEST_S = 15.0
"""In which no part could end."""
_LAST_LINES = 12
_PROGRAM = [sys.executable, "-m", "benchmarks.gpu.runner"]


def measured(
    settings: Settings, parts: Sequence[str], *, again: bool, until_s: float
) -> Iterator[tuple[str, Figures]]:
    """Figures of each part, as soon as there are any: those of an earlier call at once.

    Args:
        again: measure also what has been measured without a failure.
        until_s: on `time.monotonic`; what would go beyond is left to another call.
    """
    for part in parts:
        file = settings.figures_file(part)
        known = _read(file)
        if known is not None and not known.failure and not again:
            yield part, known
            continue
        begun_s = time.monotonic()
        if until_s - begun_s < _FEWEST_S:
            continue
        file.unlink(missing_ok=True)
        figures = _in_a_process(settings, part, min(PARTS[part], until_s - begun_s))
        figures = msgspec.structs.replace(figures, seconds=time.monotonic() - begun_s)
        _write(file, figures)
        yield part, figures


def _in_a_process(settings: Settings, part: str, patience_s: float) -> Figures:
    """What a fault of the device leaves behind ends with the process, as does all memory."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [*_PROGRAM, part],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
        try:
            process.communicate(msgspec.json.encode(settings), timeout=patience_s)
            why = f"its process ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            why = f"it took more than {patience_s:.0f} s"
        finally:
            _end_session(process)
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
    found = _read(settings.figures_file(part)) or Figures(title=part, failure=UNENDED)
    if found.failure != UNENDED:
        return found
    return msgspec.structs.replace(found, failure="\n".join([why, *lines]))


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End a part and all processes that it has started: an engine holds the device's memory."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_part(settings: Settings, part: str) -> Figures:
    """In this process, with each row written as it comes; a failure is told, and where it lies."""
    module = importlib.import_module(f"benchmarks.gpu.parts.{part}")
    clock = partial(sm_clock_mhz, settings.torch_device)
    report = Report(module.TITLE, partial(_write, settings.figures_file(part)), clock)
    try:
        module.run(settings, report)
    except PartFailedError as error:
        return report.figures(str(error))
    except Exception as error:
        where = "".join(traceback.format_exception(error)[-3:])
        return report.figures(f"\n\n```\n{where}```")
    return report.figures()


def _read(file: Path) -> Figures | None:
    return msgspec.json.decode(file.read_bytes(), type=Figures) if file.exists() else None


def _write(file: Path, figures: Figures) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(figures)))


if __name__ == "__main__":
    given = msgspec.json.decode(sys.stdin.buffer.read(), type=Settings)
    _write(given.figures_file(sys.argv[1]), run_part(given, sys.argv[1]))
