"""How a front door reaches replicas, independent of the transport."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Protocol


class Line:
    """A front door's request to join one more replica; made on its event loop.

    Attributes:
        door_id: the front door's id at replicas.
        is_to_end: set when the replica is about to end: it ends once no front door is joined.
    """

    def __init__(self, door_id: str) -> None:
        self.door_id = door_id
        self.is_to_end = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Pickle as the door's id: replicas need only that, and the line stays here."""
        return str, (self.door_id,)

    def end(self) -> None:
        """Set `is_to_end`; any thread may call this."""
        self._loop.call_soon_threadsafe(self.is_to_end.set)


class Replicas(Protocol):
    """The replicas of a fleet, or of one of its pools; they come and go.

    Attributes:
        death: why there will be no more replicas; empty while there may be.
    """

    @property
    def death(self) -> str: ...

    def attach(self, line: Line) -> AsyncGenerator[bytes]:
        """Join a replica that has no line yet, and wait until there is one.

        Yields packed `FromReplica` messages, first a `Joined`, until the replica ends.

        Raises:
            Exception: the replica is lost.
        """
        ...

    async def send(self, replica_id: str, door_id: str, frame: bytes) -> None:
        """Send a packed `Sent`; raises if the replica is lost."""
        ...

    async def close(self) -> None:
        """End what was started for this front door."""
        ...
