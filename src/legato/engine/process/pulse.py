"""Tells a process that is stopped or stuck from one that is busy, however long it takes."""

import psutil

TICK_S = 1.0
"""Between two looks at a process."""
MAX_SILENT = 10
"""Ticks in a row without a sign of life after which a process is killed."""
_SUSPECT = 2


class Pulse:
    """Counts ticks in a row in which a process neither answered nor computed.

    Ticks are counted, and not seconds, so that nothing is held against a process that was stopped
    together with the one that looks, as a container is.

    Args:
        pid: of a process that has been asked something.
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
        """Whether the process is to be killed."""
        return self._num_silent >= self._max_silent

    def note_answer(self) -> None:
        """The process has answered."""
        self._has_answered = True

    def tick(self) -> None:
        """Look at the process; to be called every `TICK_S`."""
        computed_s = _processor_time_s(self._pid)
        is_alive = self._has_answered or computed_s != self._computed_s
        self._num_silent = 0 if is_alive else self._num_silent + 1
        self._has_answered, self._computed_s = False, computed_s


def _processor_time_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:  # it is gone, or about to be
        return 0.0
    return float(times.user + times.system)
