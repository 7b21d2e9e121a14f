"""Measures how long each part of a start takes."""

import time


class StartTimer:
    """Seconds of each part, in the order in which the parts end.

    Attributes:
        seconds: key: the name of the part.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last_s = time.monotonic()

    def end(self, name: str) -> None:
        """Count the time since the last part ended."""
        now_s = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now_s - self._last_s
        self._last_s = now_s
