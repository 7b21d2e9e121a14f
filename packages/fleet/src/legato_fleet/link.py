"""A front door's connection to one replica."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

from legato.core.request import AbortRequest, AddRequest
from legato.core.stats import EngineStats, ReplicaStats
from legato.engine.process.channel import pack, unpacker
from legato.engine.process.messages import EngineInfo
from legato.engine.process.pending import MAX_SENT_TOKENS, PendingRequests
from legato_fleet.records import ForeignClock
from legato_fleet.replica_messages import FromReplica, Joined, Sent, Ticketed, ToReplica
from legato_fleet.replicas import Line, Replicas
from legato_fleet.routing.request import Role

_MOST_AT_ONCE = 64
"""Events in one frame."""
_SPEAK_EVERY_S = 10.0

_UNPACKER = unpacker(FromReplica)


class Link:
    """A connection to one replica. Made by `open`.

    Attributes:
        replica_id, role, info, started_s: as in `Joined`.
        state: the replica's latest; None while its engine is being restarted.
        transfer: as in `Tells`, the latest.
        line: says when the replica is about to end.
        stats: of the replica's engine, after its latest step.
        clock: the replica's.
    """

    def __init__(
        self, joined: Joined, line: Line, frames: AsyncGenerator[bytes], replicas: Replicas
    ) -> None:
        self.replica_id = joined.replica_id
        self.role: Role = joined.role
        self.info: EngineInfo = joined.info
        self.state = joined.state
        self.started_s = joined.started_s
        self.transfer = joined.info.transfer
        self.line = line
        self.stats = EngineStats()
        self.clock = ForeignClock()
        self._frames = frames
        self._replicas = replicas
        self._waiting: list[ToReplica] = []  # sent before all requests; includes aborts
        self._pending = PendingRequests[AddRequest | Ticketed]()
        self._has_more = asyncio.Event()

    @classmethod
    async def open(cls, replicas: Replicas, door_id: str) -> "Link":
        """Join a replica that has no link yet; raises as `Replicas.attach`."""
        line = Line(door_id)
        frames = replicas.attach(line)
        try:
            joined = _UNPACKER.decode(await anext(frames))
            assert isinstance(joined, Joined), "a replica begins with who it is"
        except BaseException:
            await frames.aclose()
            raise
        return cls(joined, line, frames, replicas)

    @property
    def replica_stats(self) -> ReplicaStats:
        return ReplicaStats(
            started_s=self.started_s,
            delay_s=0.0 if self.state is None else self.state.delay_s,
            num_running=self.stats.num_running,
            num_waiting=self.stats.num_waiting,
            kv_usage=self.stats.kv_usage,
        )

    def put(self, event: ToReplica) -> None:
        """Queue an event to send; an abort cancels a request that is still queued."""
        match event:
            case AddRequest():
                self._pending.add(event, event)
            case Ticketed(request=request):
                self._pending.add(request, event)
            case AbortRequest(request_id=request_id) if self._pending.drop(request_id):
                return
            case _:
                self._waiting.append(event)
        self._has_more.set()

    async def send_all(self) -> None:
        """Send queued events, for ever; raises if the replica is lost.

        One frame is in flight at a time; events queued meanwhile go together in the next, requests
        in turns of their tenants. An empty frame is sent at intervals, since a silent front door
        counts as dead.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SPEAK_EVERY_S):
                    await self._has_more.wait()
            self._has_more.clear()
            await self._send_some()
            while self._waiting or self._pending:
                await self._send_some()

    async def _send_some(self) -> None:
        events = self._waiting[:_MOST_AT_ONCE]
        del self._waiting[:_MOST_AT_ONCE]
        events += self._pending.take(_MOST_AT_ONCE - len(events), MAX_SENT_TOKENS)
        frame = pack(Sent(events=events, sent_s=time.monotonic()))
        await self._replicas.send(self.replica_id, self.line.door_id, frame)

    async def messages(self) -> AsyncGenerator[FromReplica]:
        """Yield the replica's messages until it ends; raises if it is lost."""
        async for frame in self._frames:
            yield _UNPACKER.decode(frame)

    async def close(self) -> None:
        """Leave the replica."""
        await self._frames.aclose()
