"""Hands records of what the engine does to whoever listens."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

_Record = TypeVar("_Record")


class Subscription(Generic[_Record]):
    """The records published since it was made. As a context manager, closes at its end.

    Attributes:
        num_dropped: records that were lost because too many waited to be taken.
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
        """All records that wait, at least one; none only where it was closed and none is left."""
        await self._arrived.wait()
        return self.take_now()

    def take_now(self) -> list[_Record]:
        """All records that wait, perhaps none."""
        records, self._waiting = self._waiting, []
        if not self._closed.is_set():
            self._arrived.clear()
        return records

    async def gather(self, seconds: float) -> None:
        """Let records come together for so long, or until it is closed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()

    def close(self) -> None:
        """Take no more records; those that wait may still be taken."""
        if not self._closed.is_set():
            self._closed.set()
            self._on_close(self)
            self._arrived.set()


class RecordFeed(Generic[_Record]):
    """Where records come together.

    Args:
        on_demand: called with whether anybody listens, whenever that changes.
    """

    def __init__(self, on_demand: Callable[[bool], None]) -> None:
        self._on_demand = on_demand
        self._subscriptions: list[Subscription[_Record]] = []

    @property
    def is_wanted(self) -> bool:
        """Whether anybody listens."""
        return bool(self._subscriptions)

    def subscribe(self, max_records: int = 8192) -> Subscription[_Record]:
        """Args: max_records: that may wait to be taken; what comes then is dropped and counted."""
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
