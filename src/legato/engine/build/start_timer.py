"""Measures how long each part of a start takes."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_LONG_S = 0.5


class StartTimer:
    """Seconds of each part, in the order in which the parts end.

    Args:
        on_end: called with the name of each part that ends, and its seconds so far.

    Attributes:
        seconds: key: the name of the part.
    """

    def __init__(self, on_end: Callable[[str, float], object] = lambda *_: None) -> None:
        self._on_end = on_end
        self.seconds: dict[str, float] = {}
        self._last_s = time.monotonic()

    def end(self, name: str) -> None:
        """Count the time since the last part ended, and log it if that was long."""
        now_s = time.monotonic()
        if (taken_s := now_s - self._last_s) >= _LONG_S:
            logger.info("start: %s took %.1f s", name, taken_s)
        self.seconds[name] = self.seconds.get(name, 0.0) + now_s - self._last_s
        self._last_s = now_s
        self._on_end(name, self.seconds[name])
