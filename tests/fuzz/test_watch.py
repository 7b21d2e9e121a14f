"""The fuzzer sees which stream is delayed, and by which case."""

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.api.launch import ServerProcess
from tests.fuzz.delays import Delays
from tests.fuzz.watch import HEALTH, MACHINE, STREAM, Wait, read_waits, watching

_STOPPED_S = 0.6
_ITL_S = 0.1


def test_a_delay_is_what_neither_the_promise_nor_the_machine_explains() -> None:
    waits = [
        Wait(MACHINE, 0.9, 0.01),
        Wait(STREAM, 0.95, 0.3),
        Wait(MACHINE, 1.0, 0.06),
        Wait(HEALTH, 1.02, 0.08),
        Wait(MACHINE, 1.2, 0.02),
        Wait(MACHINE, 5.0, 0.9),
    ]
    delays = Delays(waits, _ITL_S)
    assert delays.worst_s(STREAM, [0.0]) == pytest.approx([0.3 - 0.1 - 0.06])
    assert delays.worst_s(HEALTH, [0.0]) == pytest.approx([0.08 - 0.06])
    assert delays.machine_worst_s() == 0.9


def test_a_delay_is_the_case_s_in_which_most_of_it_lies() -> None:
    waits = [Wait(HEALTH, 0.99, 0.5), Wait(HEALTH, 1.7, 0.4), Wait(HEALTH, 2.5, 0.2)]
    worst_s = Delays(waits, _ITL_S).worst_s(HEALTH, [0.0, 1.0, 2.0])
    assert worst_s == pytest.approx([0.0, 0.5, 0.2])


@pytest.mark.parametrize("who", ["server", "engine", "watcher"])
def test_whom_a_stop_delays(target: ServerProcess, tmp_path: Path, who: str) -> None:
    find: dict[str, Callable[[], psutil.Process]] = {
        "server": lambda: psutil.Process(target.process.pid),
        "engine": lambda: target.engine,
        "watcher": _watcher,
    }
    with watching(target, tmp_path / "waits"):
        start_s = time.monotonic()
        stopped = find[who]()
        stopped.suspend()
        try:
            time.sleep(_STOPPED_S)
        finally:
            stopped.resume()
        time.sleep(_STOPPED_S)
    delays = Delays(read_waits(tmp_path / "waits"), _ITL_S)
    is_late = [delays.worst_s(what, [start_s])[0] > _STOPPED_S / 2 for what in (HEALTH, STREAM)]
    assert (
        is_late
        == {
            "server": [True, True],
            "engine": [False, True],
            "watcher": [False, False],  # as the whole machine would
        }[who]
    )


def _watcher() -> psutil.Process:
    children = psutil.Process().children()
    [watcher] = [child for child in children if "tests.fuzz.watch" in child.cmdline()]
    return watcher
