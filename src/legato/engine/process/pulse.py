"""Tells a stopped or stuck process from a busy one, however long its steps take."""

import psutil

TICK_S = 1.0
"""Time between two looks at a process."""
MAX_SILENT = 10
"""Ticks in a row without a sign of life after which a process is killed."""
_SUSPECT = 2


class Pulse:
    """Counts ticks in a row in which a process neither answered nor computed.

    It counts ticks rather than seconds: if a container is paused, both processes stop, and that
    time must not count.

    Args:
        pid: the process, which was asked for an answer.
        max_silent: ticks after which it counts as stuck.
    """

    def __init__(self, pid: int, max_silent: int = MAX_SILENT) -> None:
        self._pid = pid
        self._max_silent = max_silent
        self._num_silent = 0
        self._has_answered = True
        self._computed_s = 0.0

    @property
    def is_suspect(self) -> bool:
        """Whether the process may be stuck."""
        return self._num_silent >= _SUSPECT

    @property
    def is_stuck(self) -> bool:
        """Whether the process should be killed."""
        return self._num_silent >= self._max_silent

    def note_answer(self) -> None:
        """Note that the process has answered."""
        self._has_answered = True

    def tick(self) -> None:
        """Look at the process; call it every `TICK_S`."""
        computed_s = processor_time_s(self._pid)
        is_alive = self._has_answered or computed_s != self._computed_s
        self._num_silent = 0 if is_alive else self._num_silent + 1
        self._has_answered, self._computed_s = False, computed_s


def processor_time_s(pid: int) -> float:
    """Return how long a process has computed; 0 if it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:  # it is gone, or is ending
        return 0.0
    return float(times.user + times.system)
