"""A plugin of pytest that writes how each test ended as soon as it has: a line of JSON each."""

from pathlib import Path

import msgspec
import pytest

_MESSAGE_CHARS = 300


class Outcome(msgspec.Struct, frozen=True):
    """Attributes: result: passed, failed or skipped; why: of one that failed."""

    name: str
    result: str
    why: str = ""


def outcomes(file: Path) -> list[Outcome]:
    """Those so far."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return [msgspec.json.decode(line, type=Outcome) for line in lines if line.endswith(b"\n")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="file to write")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--outcomes")
    if file is not None and not hasattr(config, "workerinput"):  # workers tell the first process
        config.pluginmanager.register(_Writer(file))


class _Writer:
    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that fails while it is cleaned up after has two lines."""
        if report.passed and report.when != "call":
            return
        why = " ".join(report.longreprtext.split())[-_MESSAGE_CHARS:] if report.failed else ""
        line = msgspec.json.encode(Outcome(report.nodeid, report.outcome, why))
        with self._file.open("ab") as file:
            file.write(line + b"\n")
