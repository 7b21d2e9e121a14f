"""How long each part of a start takes."""

import time


class StartTimer:
    """Seconds of each part, as they come to an end one after the other.

    Attributes:
        seconds: key the part's name, in the order in which they ended.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last_s = time.monotonic()

    def end(self, name: str) -> None:
        now_s = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now_s - self._last_s
        self._last_s = now_s
