"""Publishes the engine's records to subscribers; keeps the latest steps for late ones."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from legato.core.request import AddRequest
from legato.core.step_record import (
    EngineRecord,
    LiveRecord,
    Record,
    RequestSent,
    StepBegun,
    StepRecord,
    received,
)

_Record = TypeVar("_Record")

_MAX_CHUNKS = 4096
"""Chunks kept, over all steps: half a megabyte, or at least ten seconds of a few streams."""


class Subscription(Generic[_Record]):
    """Receives records from now on. As a context manager, it closes at its end.

    Attributes:
        num_dropped: records dropped because too many waited.
    """

    def __init__(
        self, max_records: int, on_close: Callable[["Subscription[_Record]"], None]
    ) -> None:
        self.num_dropped = 0
        self._max_records = max_records
        self._on_close = on_close
        self._waiting: list[_Record] = []
        self._arrived = asyncio.Event()
        self._closed = asyncio.Event()

    def __enter__(self) -> "Subscription[_Record]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, records: list[_Record]) -> None:
        room = self._max_records - len(self._waiting)
        self._waiting += records[:room]
        self.num_dropped += max(0, len(records) - room)
        self._arrived.set()

    async def take(self) -> list[_Record]:
        """Wait for records and return all; empty only once it is closed and none is left."""
        await self._arrived.wait()
        return self.take_now()

    def take_now(self) -> list[_Record]:
        """Return all waiting records, perhaps none."""
        records, self._waiting = self._waiting, []
        if not self._closed.is_set():
            self._arrived.clear()
        return records

    async def gather(self, seconds: float) -> None:
        """Wait for so many seconds, or until it is closed, so that records accumulate."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()

    def close(self) -> None:
        """Stop receiving records; waiting records may still be taken."""
        if not self._closed.is_set():
            self._closed.set()
            self._on_close(self)
            self._arrived.set()


class RecordFeed(Generic[_Record]):
    """Publishes records to all subscriptions.

    Args:
        on_demand: called with whether there are subscriptions, at each change.
    """

    def __init__(self, on_demand: Callable[[bool], None]) -> None:
        self._on_demand = on_demand
        self._subscriptions: list[Subscription[_Record]] = []

    @property
    def is_wanted(self) -> bool:
        """Whether there are subscriptions."""
        return bool(self._subscriptions)

    def subscribe(self, max_records: int = 8192) -> Subscription[_Record]:
        """Args: max_records: most that may wait; records beyond are dropped and counted."""
        subscription = Subscription(max_records, self._leave)
        self._subscriptions.append(subscription)
        if len(self._subscriptions) == 1:
            self._on_demand(True)
        return subscription

    def publish(self, records: Iterable[_Record]) -> None:
        listed = list(records)
        if listed:
            for subscription in self._subscriptions:
                subscription.put(listed)

    def _leave(self, subscription: Subscription[_Record]) -> None:
        self._subscriptions.remove(subscription)
        if not self._subscriptions:
            self._on_demand(False)


class RecentSteps:
    """The records of the latest steps, with at most `_MAX_CHUNKS` chunks in all."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque()
        self._num_chunks = 0

    @property
    def steps(self) -> Sequence[StepRecord]:
        """The steps in the order in which they ended."""
        return tuple(self._steps)

    def note(self, step: StepRecord) -> None:
        """Record a step that has run."""
        self._steps.append(step)
        self._num_chunks += len(step.chunks)
        while self._num_chunks > _MAX_CHUNKS:
            self._num_chunks -= len(self._steps.popleft().chunks)

    def clear(self) -> None:
        """Drop all steps; later ones are a new engine's."""
        self._steps.clear()
        self._num_chunks = 0


class Activity:
    """Collects the records of an engine and publishes them.

    Args:
        set_recording, set_announcing: called when `records`, or `live`, gets its first subscriber
            or loses its last.

    Attributes:
        on_step: called with each step.
        records: of the engine's work; made while there are subscribers.
        live: records of work that has just begun; likewise.
        recent: the latest steps, also without subscribers.
        steps: of the engine, which come in any case.
    """

    def __init__(
        self,
        set_recording: Callable[[bool], None],
        set_announcing: Callable[[bool], None],
    ) -> None:
        self.on_step: Callable[[StepRecord], object] = lambda _: None
        self.records = RecordFeed[Record](set_recording)
        self.live = RecordFeed[LiveRecord](set_announcing)
        self.recent = RecentSteps()
        self.steps = RecordFeed[StepRecord](lambda _: None)

    def note_sent(self, request: AddRequest) -> None:
        """Publish that a request was sent to the engine."""
        if self.live.is_wanted:
            self.live.publish([sent(request)])

    def note_begun(self, step: StepBegun) -> None:
        """Publish that the engine is about to run a step."""
        self.live.publish([step])

    def note(self, records: Iterable[EngineRecord], now_s: float) -> list[StepRecord]:
        """Publish the engine's records; return the steps among them."""
        come = [received(record, now_s) for record in records]
        steps = [record for record in come if isinstance(record, StepRecord)]
        for step in steps:
            self.on_step(step)
            self.recent.note(step)
        self.steps.publish(steps)
        self.records.publish(come)
        return steps


def sent(request: AddRequest) -> RequestSent:
    """Return the live record of a request."""
    return RequestSent(
        request_id=request.request_id,
        arrived_s=request.sent_s,
        num_prompt_tokens=len(request.prompt_token_ids),
        slo_class=request.service.slo_class,
    )
