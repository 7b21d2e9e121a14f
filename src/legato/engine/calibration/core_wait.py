"""How long this process could have computed, had others not had the cores."""

import time
from pathlib import Path

import psutil

_TASKS = Path("/proc/self/task")


class CoreWait:
    """Seconds that threads of this process waited for a core, from when it was made.

    Linux counts that by thread. Elsewhere it is taken to be what other programs had of the cores
    beyond what nobody had: who leaves a core idle has let nobody wait.
    """

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._before = _waits_s()
        self._machine_before = _machine_s()

    @property
    def share(self) -> float:
        """Of each second, summed over threads; it may be more than 1."""
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
    """By thread; empty where it is not counted."""
    waits: dict[str, float] = {}
    for file in _TASKS.glob("*/schedstat"):
        try:
            _, waited_ns, _ = file.read_text().split()
        except (OSError, ValueError):  # the thread has ended, or nothing is counted
            continue
        waits[file.parent.name] = int(waited_ns) / 1e9
    return waits


def _machine_s() -> tuple[float, float]:
    """Core-seconds that nobody had, and that others had, from the machine's start."""
    machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
    idle_s = float(machine.idle)
    return idle_s, float(sum(machine)) - idle_s - float(own.user + own.system)
