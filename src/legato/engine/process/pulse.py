"""Tells a stopped process, and one that computes without end, from a busy one."""

import math

import psutil

TICK_S = 1.0
"""Time between two looks at a process."""
MAX_SILENT = 10
"""Ticks in a row without a sign of life after which a process is killed."""
_SUSPECT = 2
_TIMES_PREDICTED = 10
"""A step may take so many times its predicted duration before its process is killed."""


class Pulse:
    """Counts ticks in a row without an answer, and ticks in which the process computed nothing.

    It counts ticks rather than seconds: if a container is paused or the machine sleeps, both
    processes stop, and that time must not count.

    Args:
        pid: the process, which was asked for an answer.
        max_silent: ticks without computing after which it counts as stuck.
        max_unanswered: ticks without an answer after which it counts as stuck though it computes;
            it answers between two steps, so this is the least bound of a step.
    """

    def __init__(
        self, pid: int, max_silent: int = MAX_SILENT, max_unanswered: float = math.inf
    ) -> None:
        self._pid = pid
        self._max_silent = max_silent
        self._max_unanswered = self._least_unanswered = max_unanswered
        self._num_silent = self._num_unanswered = 0
        self._has_answered = True
        self._computed_s = 0.0

    @property
    def is_suspect(self) -> bool:
        """Whether the process may be stuck."""
        is_overdue = 2 * self._num_unanswered >= max(_SUSPECT, self._max_unanswered)
        return self._num_silent >= _SUSPECT or is_overdue

    @property
    def is_stuck(self) -> bool:
        """Whether the process should be killed."""
        is_overdue = self._num_unanswered >= self._max_unanswered
        return is_overdue or self._num_silent >= self._max_silent

    @property
    def complaint(self) -> str:
        """What the process does not do, for the log."""
        if self._num_unanswered >= self._max_unanswered:
            return f"has not answered for {self._num_unanswered * TICK_S:.0f} s"
        return "neither answers nor computes"

    def note_step(self, predicted_s: float) -> None:
        """Note that a step begins which should take so long; the bound lasts until an answer."""
        self._max_unanswered = max(self._least_unanswered, _TIMES_PREDICTED * predicted_s / TICK_S)

    def note_answer(self) -> None:
        """Note that the process has answered."""
        self._has_answered = True
        self._num_unanswered = 0
        self._max_unanswered = self._least_unanswered

    def tick(self) -> None:
        """Look at the process; call it every `TICK_S`."""
        computed_s = processor_time_s(self._pid)
        is_alive = self._has_answered or computed_s != self._computed_s
        self._num_silent = 0 if is_alive else self._num_silent + 1
        if not self._has_answered:
            self._num_unanswered += 1
        self._has_answered, self._computed_s = False, computed_s


def processor_time_s(pid: int) -> float:
    """Return how long a process has computed; 0 if it is gone, or cannot be looked at."""
    try:
        times = psutil.Process(pid).cpu_times()
    except (psutil.Error, OSError):  # it is gone, or is ending; or there are no free descriptors
        return 0.0
    return float(times.user + times.system)
