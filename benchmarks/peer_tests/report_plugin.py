"""A plugin for pytest that writes how each test went to a file, a line of JSON each."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

_REPORT = Path(os.environ["PEER_TESTS_REPORT"])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _tell(report.nodeid, report.outcome, report.longrepr)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome == "failed":
        _tell(report.nodeid, "failed", report.longrepr)


def _tell(test: str, outcome: str, why: Any) -> None:
    crash = getattr(why, "reprcrash", None)
    said = crash.message if crash is not None else str(why or "")
    with _REPORT.open("a", encoding="utf-8") as report:
        report.write(json.dumps({"test": test, "outcome": outcome, "message": said}) + "\n")
