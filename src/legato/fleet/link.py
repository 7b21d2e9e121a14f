"""One replica that a front door is joined to."""

import asyncio
import time
from collections.abc import AsyncGenerator

from legato.core.request import Event
from legato.core.stats import EngineStats
from legato.engine.process.channel import pack, unpacker
from legato.engine.process.messages import EngineInfo, KnowVocabulary
from legato.fleet.messages import FromReplica, Joined, Sent
from legato.fleet.replicas import Line, Replicas

_MOST_AT_ONCE = 64
"""Events of a frame."""

_UNPACKER = unpacker(FromReplica)


class Link:
    """Made by `open`.

    Attributes:
        replica_id, info, first_state: as in `Joined`.
        line: tells when it is to end.
        stats: of the replica's engine, as of its latest step.
    """

    def __init__(
        self, joined: Joined, line: Line, frames: AsyncGenerator[bytes], replicas: Replicas
    ) -> None:
        self.replica_id = joined.replica_id
        self.info: EngineInfo = joined.info
        self.first_state = joined.state
        self.line = line
        self.stats = EngineStats()
        self._frames = frames
        self._replicas = replicas
        self._waiting: list[Event | KnowVocabulary] = []
        self._has_more = asyncio.Event()

    @classmethod
    async def open(cls, replicas: Replicas, door_id: str) -> "Link":
        """To a replica to which there is none yet; raises what `Replicas.attach` does."""
        line = Line(door_id)
        frames = replicas.attach(line)
        try:
            joined = _UNPACKER.decode(await anext(frames))
            assert isinstance(joined, Joined), "a replica begins with who it is"
        except BaseException:
            await frames.aclose()
            raise
        return cls(joined, line, frames, replicas)

    def put(self, event: Event | KnowVocabulary) -> None:
        """Send an event as soon as it is its turn."""
        self._waiting.append(event)
        self._has_more.set()

    async def send_all(self) -> None:
        """Send what is put, for ever; raises where the replica is lost.

        One frame is on its way at a time; what is put meanwhile goes together in the next.
        """
        while True:
            await self._has_more.wait()
            self._has_more.clear()
            while self._waiting:
                events = self._waiting[:_MOST_AT_ONCE]
                del self._waiting[:_MOST_AT_ONCE]
                frame = pack(Sent(events=events, sent_s=time.monotonic()))
                await self._replicas.send(self.replica_id, self.line.door_id, frame)

    async def messages(self) -> AsyncGenerator[FromReplica]:
        """What the replica tells, until it ends; raises where it is lost."""
        async for frame in self._frames:
            yield _UNPACKER.decode(frame)

    async def close(self) -> None:
        """Leave the replica."""
        await self._frames.aclose()
