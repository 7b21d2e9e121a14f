"""The tests of `legato.gpu`, on the device itself: kernels compiled and not interpreted."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.figures import PartFailedError, Report, Row
from benchmarks.gpu.outcomes import Outcome, outcomes
from benchmarks.gpu.settings import Settings

TITLE = "Tests on the device"

_ROOT = Path(__file__).parents[3]
_HAVE_RUN = (0, 1)
"""Statuses of a run whose tests passed, or failed."""
_LOOK_S = 0.5
_RESULTS = ("passed", "failed", "skipped")


def run(_: Settings, report: Report) -> None:
    folder = _ROOT / "tests" / "gpu"
    # Of what a kernel compiles to for GPUs that are not there, nothing is to be learned here.
    options = [f"--ignore={folder / 'test_compile.py'}"]
    if find_spec("xdist"):
        options += ["--numprocesses", "4"]  # compiling takes longer than running
    of_tests([folder], report, options)


def of_tests(paths: Sequence[Path], report: Report, options: Sequence[str] = ()) -> None:
    """How tests end in a process of their own, told while they run."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as said:
        file = Path(folder) / "outcomes.jsonl"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu.outcomes"]
        command += [f"--outcomes={file}", *options, *map(str, paths)]
        process = subprocess.Popen(
            command, cwd=_ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            report.add(*_rows(outcomes(file)))
            time.sleep(_LOOK_S)
        found = outcomes(file)
        said.seek(0)
        text = said.read().decode(errors="replace")
    report.add(*_rows(found))
    if process.returncode not in _HAVE_RUN:
        raise PartFailedError(text)
    failed = [one for one in found if one.result == "failed"]
    if failed:
        report.note("\n".join(f"- `{one.name}`: {one.why}" for one in failed))
        raise PartFailedError(f"{len(failed)} tests")


def _rows(found: Sequence[Outcome]) -> list[Row]:
    results = [one.result for one in found]
    return [Row(name=name, value=results.count(name), unit="") for name in _RESULTS]
