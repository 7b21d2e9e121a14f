"""An event loop without waits, for code that shares it with no other process."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class InstantLoop(asyncio.SelectorEventLoop):
    """Its clock goes straight on to the next timer where nothing else is due."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_InstantSelector(self))

    def time(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds


class _InstantSelector(selectors.DefaultSelector):
    def __init__(self, loop: InstantLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        if not ready:
            self._loop.advance(timeout)
        return ready


def run_at_once(main: Coroutine[Any, Any, None]) -> None:
    """As `asyncio.run`, in no time."""
    with asyncio.Runner(loop_factory=InstantLoop) as runner:
        runner.run(main)
