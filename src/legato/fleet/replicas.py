"""How a front door reaches replicas, whatever carries the messages."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Protocol


class Line:
    """A front door's wish to be joined to one replica more; made on its event loop.

    Attributes:
        door_id: of the front door, as replicas know it.
        is_to_end: set where the replica is about to go: once nobody is joined to it, it ends.
    """

    def __init__(self, door_id: str) -> None:
        self.door_id = door_id
        self.is_to_end = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """It leads through this process alone: what goes to a replica is the door's id."""
        return str, (self.door_id,)

    def end(self) -> None:
        """Set `is_to_end`; any thread may call this."""
        self._loop.call_soon_threadsafe(self.is_to_end.set)


class Replicas(Protocol):
    """Those of a fleet, or of one of its pools, which come and go.

    Attributes:
        death: why there will be none any more; empty as long as there may.
    """

    @property
    def death(self) -> str: ...

    def attach(self, line: Line) -> AsyncGenerator[bytes]:
        """Join a replica to which there is no line yet, and wait until there is one.

        Yields packed `FromReplica`, the first of which is `Joined`, until the replica ends.

        Raises:
            Exception: the replica is lost.
        """
        ...

    async def send(self, replica_id: str, door_id: str, frame: bytes) -> None:
        """Send a packed `Sent`; raises where the replica is lost."""
        ...

    async def close(self) -> None:
        """End what was started for this front door."""
        ...
