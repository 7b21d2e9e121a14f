"""Settings that have to be there before torch is, the order of the tests, and their options."""

import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import profiles

if TYPE_CHECKING:
    from tests.api.servers import Servers

profiles.register()

# Modules and tests stay: the collector would visit them again and again while they are collected,
# and in all tests after.
gc.disable()

# Tests share the cores with the servers they start: see SHORT_SPIN in
# legato/engine/process/engine_process.py.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Kernels are interpreted where there is no GPU. Triton reads this when it is imported, which
# transformers does in passing.
_GPUS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
os.environ.setdefault("TRITON_INTERPRET", "0" if any(map(Path.exists, _GPUS)) else "1")

# Workers share the cores, too, and threads that wait for each other crawl on a busy machine.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    num_threads = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_threads)))

_LONG_FILES = ("fuzz/test_native_kernels.py", "gpu/test_compile.py", "scheduler/test_invariants.py")
"""Files that keep a core busy for a minute and more: they begin before all folders."""

_LONGEST = ("exactness", "engine", "api", "cli", "soak", "lab", "browser", "fuzz")
"""Folders to begin with, so that at the end no worker waits for another's last long file."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--screenshots",
        type=Path,
        metavar="FOLDER",
        help="keep the dashboard's screenshots there (docs has some)",
    )


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Servers]":
    from tests.api.servers import Servers

    servers = Servers(lambda: tmp_path_factory.mktemp("server"))
    yield servers
    servers.stop()


@pytest.fixture(scope="session")
def calibration_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the steps of the default model are measured once, for all who promise anything."""
    from tests.api.calibrated import calibrate

    folder = tmp_path_factory.mktemp("calibration")
    calibrate(folder)
    return folder


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from tests.distribution import FilesTogether

    return FilesTogether(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    from tests.executor.instructions import how_they_run

    terminalreporter.write_line(f"kernels: {how_they_run()}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_begins_after)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:  # the process that hands out tests collects none of them
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Give the memory of a file's models back; glibc keeps a gigabyte and more of it."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or Triton's bindings would report leaks


def _begins_after(item: pytest.Item) -> tuple[bool, int]:
    folder = item.path.parent.name
    is_long = f"{folder}/{item.path.name}" in _LONG_FILES
    return not is_long, _LONGEST.index(folder) if folder in _LONGEST else len(_LONGEST)
