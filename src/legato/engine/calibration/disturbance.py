"""How other programs disturb a measurement: waits for a core, and what is good enough to keep."""

import time
from pathlib import Path

import msgspec
import numpy as np
import psutil

from legato.core.rows import RowCounts
from legato.scheduler.cost_fit import MOST_DISTURBED, MeasuredStep, disturbed, fit, relative_errors

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


MOST_ERROR = 0.25
"""Largest relative error of 95 % of the steps."""
MOST_WAITED = 0.1


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """How far the steps of a calibration can be trusted.

    Attributes:
        median_error, p95_error: relative errors of the predictions for these same steps.
        disturbed: share of the steps that took far longer than similar steps.
        waited: seconds per second that threads of the process waited for a core; see `CoreWait`.
            Another program may make all steps longer alike, which no error shows.
    """

    median_error: float
    p95_error: float
    disturbed: float
    waited: float

    @classmethod
    def of(cls, steps: list[MeasuredStep], rows: RowCounts, waited: float) -> "Quality":
        costs = fit(steps, rows)
        errors = relative_errors(steps, costs)
        return cls(
            median_error=float(np.median(errors)),
            p95_error=float(np.quantile(errors, 0.95)),
            disturbed=disturbed(steps, costs),
            waited=waited,
        )

    @property
    def doubt(self) -> str:
        """Why the steps are not kept for later starts; empty if they are kept."""
        if self.waited > MOST_WAITED:
            return f"the engine's threads waited for a core {self.waited:.0%} of the time"
        if self.disturbed > MOST_DISTURBED:
            return f"{self.disturbed:.0%} of the steps took far longer than others like them"
        if self.p95_error > MOST_ERROR:
            return f"95 % of the steps are predicted within {self.p95_error:.0%} only"
        return ""
