"""Requests on their way into an engine: a flood of them delays no step for long."""

import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from legato.core.outputs import RequestOutput
from legato.core.request import AddRequest, Event

if TYPE_CHECKING:
    from legato.engine.loop.engine_loop import EngineLoop

_TAKING_S = 0.005
"""Longest time between two steps in which another request is taken. One takes up to 2 ms where load
is shed, since its first token is forecast."""


class Arrivals:
    """Requests that an engine was sent and has not taken, in the order in which they came."""

    def __init__(self, engine: "EngineLoop", clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._requests: dict[str, AddRequest] = {}

    def __bool__(self) -> bool:
        return bool(self._requests)

    def take(self, events: Iterable[Event]) -> tuple[int, list[RequestOutput]]:
        """Apply all other events, and as many requests as steps may wait for; an idle engine's all.

        Returns:
            the number of requests that were taken, and the ends that are known without a step.
        """
        num_taken, outputs = 0, list[RequestOutput]()
        longest_s = _TAKING_S if self._engine.has_work else math.inf
        for event in events:
            if isinstance(event, AddRequest):
                self._requests[event.request_id] = event
                continue
            arriving = self._requests.pop(event.request_id, None)
            outputs += self._engine.apply([event] if arriving is None else [arriving, event])
            num_taken += arriving is not None
        ends_s = self._clock() + longest_s
        while self._requests and (not num_taken or self._clock() < ends_s):
            outputs += self._engine.apply([self._requests.pop(next(iter(self._requests)))])
            num_taken += 1
        return num_taken, outputs
