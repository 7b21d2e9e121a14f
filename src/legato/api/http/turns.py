"""Turns for long work: one per iteration of the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable


class Turns:
    """Calls waiting callbacks in order, one per iteration of the event loop.

    However many wait, they block the event loop for no longer than one of them takes.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()

    def wait(self, go_on: Callable[[], object]) -> None:
        """Call this once, in its turn."""
        self._waiting.append(go_on)
        if len(self._waiting) == 1:
            self._schedule()

    async def turn(self) -> None:
        """Wait for a turn."""
        begun = asyncio.Event()
        self.wait(begun.set)
        await begun.wait()

    def _schedule(self) -> None:
        asyncio.get_running_loop().call_soon(self._call_next)

    def _call_next(self) -> None:
        go_on = self._waiting.popleft()
        if self._waiting:
            self._schedule()
        go_on()
