"""The tests of `legato.gpu`, on the device itself: kernels compiled and not interpreted."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.figures import Figures, Row
from benchmarks.gpu.settings import Settings

_ROOT = Path(__file__).parents[3]
_HAVE_RUN = (0, 1)
"""Statuses of a run whose tests passed, or failed."""
_OUTCOMES = ("passed", "failed", "skipped")
_MESSAGE_CHARS = 300


def run(_: Settings) -> Figures:
    folder = _ROOT / "tests" / "gpu"
    # Of what a kernel compiles to for GPUs that are not there, nothing is to be learned here.
    options = [f"--ignore={folder / 'test_compile.py'}"]
    if find_spec("xdist"):
        options += ["--numprocesses", "4"]  # compiling takes longer than running
    return of_tests([folder], options)


def of_tests(paths: Sequence[Path], options: Sequence[str] = ()) -> Figures:
    """How tests end in a process of their own."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *options]
        command += map(str, paths)
        ended = subprocess.run(
            command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False
        )
        if ended.returncode not in _HAVE_RUN:
            return Figures(title="Tests on the device", failure=ended.stdout + ended.stderr)
        cases = list(ElementTree.parse(report).iter("testcase"))
    outcomes = [_outcome(case) for case in cases]
    failed = [f"- {_told(case)}" for case in cases if _outcome(case) == "failed"]
    return Figures(
        title="Tests on the device",
        rows=[Row(name=name, value=outcomes.count(name), unit="") for name in _OUTCOMES],
        notes=["\n".join(failed)] if failed else [],
        failure=f"{len(failed)} tests" if failed else "",
    )


def _outcome(case: ElementTree.Element) -> str:
    tags = {child.tag for child in case}
    if tags & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in tags else "passed"


def _told(case: ElementTree.Element) -> str:
    (why, *_) = [child for child in case if child.tag in ("failure", "error")]
    message = " ".join((why.get("message") or "").split())[:_MESSAGE_CHARS]
    return f"`{case.get('classname')}::{case.get('name')}`: {message}"
