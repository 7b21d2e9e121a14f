"""Measures how long other programs kept this process from computing."""

import time
from pathlib import Path

import psutil

_TASKS = Path("/proc/self/task")


class CoreWait:
    """Seconds that threads of this process waited for a core since this object was made.

    Linux counts them by thread. On other systems the estimate is the time of other programs on the
    cores, less the idle time: while a core is idle, no thread waits.
    """

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._before = _waits_s()
        self._machine_before = _machine_s()

    @property
    def share(self) -> float:
        """Seconds waited per second, summed over threads; may be more than 1."""
        passed_s = max(1e-9, time.perf_counter() - self._started_s)
        now = _waits_s()
        if now:
            waited_s = sum(s - self._before.get(thread, 0.0) for thread, s in now.items())
        else:
            idle_s, others_s = _machine_s()
            idle_before_s, others_before_s = self._machine_before
            waited_s = others_s - others_before_s - (idle_s - idle_before_s)
        return max(0.0, waited_s / passed_s)


def _waits_s() -> dict[str, float]:
    """Return the seconds that each thread waited; empty if the system does not count them."""
    waits: dict[str, float] = {}
    for file in _TASKS.glob("*/schedstat"):
        try:
            _, waited_ns, _ = file.read_text().split()
        except (OSError, ValueError):  # the thread has ended, or the system does not count
            continue
        waits[file.parent.name] = int(waited_ns) / 1e9
    return waits


def _machine_s() -> tuple[float, float]:
    """Return the core-seconds that were idle, and those of other programs, since the boot."""
    machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
    idle_s = float(machine.idle)
    return idle_s, float(sum(machine)) - idle_s - float(own.user + own.system)
