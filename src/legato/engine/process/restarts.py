"""How often an engine has died, and whether it is worth starting again."""

import time
from collections.abc import Callable

from legato.engine.errors import EngineDeadError

_SHORT_LIFE_S = 60.0
_MAX_SHORT_LIVES = 3
_LEAST_WAIT_S = 1.0


class Restarts:
    """Lives are told by how long an engine served, so that one slow to load can be in a loop, too.

    Args:
        loading_s: how long the first start took.
        clock: seconds.

    Attributes:
        count: of restarts, those that failed too.
    """

    def __init__(self, loading_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._loading_s = loading_s
        self._clock = clock
        self._num_short_lives = 0  # in a row
        self._died_s = 0.0
        self._ready_s: float | None = clock()  # None while it is loading

    @property
    def seconds_left(self) -> float:
        """Until the engine that is being started can be expected to serve."""
        return max(_LEAST_WAIT_S, self._died_s + self._loading_s - self._clock())

    def note_ready(self) -> None:
        """The engine serves."""
        self._ready_s = self._clock()

    def note_death(self) -> None:
        """The engine died, and is to be started again.

        Raises:
            EngineDeadError: that is no use, since it dies as soon as it serves, or before.
        """
        self._died_s = self._clock()
        served_s = 0.0 if self._ready_s is None else self._died_s - self._ready_s
        self._ready_s = None
        self._num_short_lives = self._num_short_lives + 1 if served_s < _SHORT_LIFE_S else 0
        if self._num_short_lives == _MAX_SHORT_LIVES:
            raise EngineDeadError(
                f"the engine process died {_MAX_SHORT_LIVES} times in a row, each time within "
                f"{_SHORT_LIFE_S:.0f} s of serving"
            )
        self.count += 1
