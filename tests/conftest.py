"""Settings that have to be there before torch is, and the options of the tests."""

import os
from pathlib import Path

import pytest

from tests import profiles

profiles.register()

# Tests share the cores with the servers they start: see _SHORT_SPIN in
# legato/engine/process/engine_process.py.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--screenshots",
        type=Path,
        metavar="FOLDER",
        help="keep the dashboard's screenshots there (docs has some)",
    )
