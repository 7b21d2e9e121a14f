"""Which measurements can be trusted: covered enough, and disturbed little by other programs."""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import psutil

from legato.core.rows import RowCounts
from legato.scheduler.cost_fit import (
    MOST_DISTURBED,
    MeasuredStep,
    disturbed,
    fit,
    leverage,
    relative_errors,
)
from legato.scheduler.step_costs import NUM_TERMS
from legato.scheduler.step_shape import StepShape

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

LEAST_STEPS = NUM_TERMS
"""Fewest steps of a calibration: as many as there are costs."""
_LEAST_DECODE_COUNTS = 3
_MOST_BEYOND = 2
"""Most decodes of a step in service, in multiples of the most that were measured."""
_NOISE = 0.03
"""Relative error of a step on a machine with nothing else to do."""
_CONTEXT, _CHUNK = 512, 64
"""Keys of a decode, and tokens of a chunk, that a fit must be able to predict."""


def decode_counts(max_num_seqs: int) -> list[int]:
    """Return the numbers of decodes that a calibration measures, in order."""
    return [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n <= max_num_seqs]


def coverage_gap(
    steps: Sequence[MeasuredStep], rows: RowCounts, *, max_num_seqs: int, num_tokens: int
) -> str:
    """Return which steps are missing for a fit that can be used; empty if none.

    Args:
        max_num_seqs: most decodes of a step in service.
        num_tokens: tokens whose keys the cache holds.
    """
    if len(steps) < LEAST_STEPS:
        return f"{len(steps)} steps are too few: a fit needs {LEAST_STEPS}"
    wanted = decode_counts(max_num_seqs)
    counts = {shape.num_decode_rows for shape, _ in steps} - {0}
    if len(counts) < min(_LEAST_DECODE_COUNTS, len(wanted)):
        return f"steps with decodes are too much alike: {sorted(counts)} decodes"
    if _MOST_BEYOND * max(counts) < wanted[-1]:
        return f"steps had at most {max(counts)} decodes, of up to {max_num_seqs} in service"
    if not any(shape.num_prefill_chunks for shape, _ in steps):
        return "no step had prefill"
    error = _NOISE * leverage(steps, _usual_shapes(wanted[-1], num_tokens), rows)
    if not error <= MOST_ERROR:  # nor is nan
        return f"usual steps could be predicted wrongly by {error:.0%}"
    return ""


def _usual_shapes(num_decodes: int, num_tokens: int) -> list[StepShape]:
    """Return one decode, the most, and half of the most beside a chunk."""
    one, most, mixed = StepShape(), StepShape(), StepShape()
    one.add_decode(min(_CONTEXT, num_tokens))
    context = max(1, min(_CONTEXT, num_tokens // num_decodes))
    most.add_decodes([context] * num_decodes)
    mixed.add_decodes([context] * (num_decodes // 2))
    mixed.add_prefill(0, min(_CHUNK, num_tokens), samples=0)
    return [one, most, mixed]


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """How far the steps of a calibration can be trusted.

    Attributes:
        median_error, p95_error: relative errors of the predictions for these same steps.
        disturbed: share of the steps that took far longer than similar steps.
        waited: seconds per second that threads of the process waited for a core; see `CoreWait`.
            Another program may make all steps longer alike, which no error shows.
        gap: as of `coverage_gap`.
    """

    median_error: float
    p95_error: float
    disturbed: float
    waited: float
    gap: str = ""

    @classmethod
    def of(
        cls, steps: list[MeasuredStep], rows: RowCounts, waited: float, gap: str = ""
    ) -> "Quality":
        costs = fit(steps, rows)
        errors = relative_errors(steps, costs)
        return cls(
            median_error=float(np.median(errors)),
            p95_error=float(np.quantile(errors, 0.95)),
            disturbed=disturbed(steps, costs),
            waited=waited,
            gap=gap,
        )

    @property
    def doubt(self) -> str:
        """Why the steps are not kept for later starts; empty if they are kept."""
        if self.gap:
            return self.gap
        if self.waited > MOST_WAITED:
            return f"the engine's threads waited for a core {self.waited:.0%} of the time"
        if self.disturbed > MOST_DISTURBED:
            return f"{self.disturbed:.0%} of the steps took far longer than others like them"
        if self.p95_error > MOST_ERROR:
            return f"95 % of the steps are predicted within {self.p95_error:.0%} only"
        return ""
