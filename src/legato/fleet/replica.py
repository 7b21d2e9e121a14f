"""One engine of a fleet, which serves the requests of several front doors."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from legato.core.config import EngineConfig
from legato.core.errors import InvalidRequestError
from legato.core.kv_events import KVEvent
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.replica_state import ReplicaState
from legato.core.request import AbortRequest, AddRequest, Event
from legato.core.stats import EngineStats
from legato.core.step_record import StepBegun
from legato.engine.errors import EngineDeadError
from legato.engine.frontend.requests import check_request
from legato.engine.process.channel import pack, unpacker
from legato.engine.process.engine_process import EngineProcess
from legato.engine.process.messages import EngineInfo, KnowVocabulary, StepOutputs, WatchCache
from legato.engine.process.supervisor import EngineSupervisor
from legato.fleet.messages import MAX_FRAME_BYTES, Brought, Joined, Lost, Missed, Sent, Tells

logger = logging.getLogger(__name__)

_TELL_EVERY_S = 1.0
_MOST_UNREAD = 4096
"""Frames that may wait for a front door; one that is further behind is left."""

_Frames = asyncio.Queue[bytes | None]


class Replica:
    """An engine process with its supervisor, and the front doors that use it.

    Attributes:
        replica_id: no other has had it.
        info: of the engine.
        state: what it last told of itself; None before it did, and while there is no engine.
    """

    def __init__(
        self,
        replica_id: str,
        config: EngineConfig,
        engine: EngineProcess,
        info: EngineInfo,
        *,
        timeout_s: float,
        program: Sequence[str] | None = None,
    ) -> None:
        self.replica_id = replica_id
        self.info = info
        self.state: ReplicaState | None = None
        self._doors: dict[str, _Frames] = {}  # key door id, value what is to be told it
        self._owners: dict[str, tuple[str, str]] = {}
        """Key the engine's request id, value the door's id and the request's id there."""
        self._unpacker = unpacker(Sent)
        self._stats = EngineStats()
        self._vocabulary: KnowVocabulary | None = None
        self._supervisor = EngineSupervisor(
            config, engine, self, timeout_s=timeout_s, program=program
        )
        self._telling = asyncio.create_task(self._tell_states())

    @classmethod
    async def start(
        cls,
        replica_id: str,
        config: EngineConfig,
        *,
        timeout_s: float = 300.0,
        program: Sequence[str] | None = None,
    ) -> "Replica":
        """Start the engine and wait until its model is loaded.

        Args:
            timeout_s: how long an engine with requests may say nothing before it counts as dead.
            program: as of `EngineProcess.starting`.

        Raises:
            ConfigError: the settings or the checkpoint cannot be served.
            EngineDeadError: the process died while loading.
        """
        async with EngineProcess.starting(config, program) as engine:
            info = await engine.ready()
        return cls(replica_id, config, engine, info, timeout_s=timeout_s, program=program)

    def check_running(self) -> None:
        """Raises `EngineDeadError` where there is no engine, nor will there be one."""
        if not self._supervisor.is_alive:
            raise EngineDeadError(self._supervisor.death)

    async def attach(self, door_id: str) -> AsyncGenerator[bytes]:
        """A front door comes: what it is told, as packed `FromReplica`, until either side ends.

        What it has sent and not got is aborted when it goes.
        """
        frames = self._doors[door_id] = _Frames()
        self._supervisor.send(WatchCache())  # all doors are told all of it again
        try:
            await self._ask_state()
            yield pack(Joined(replica_id=self.replica_id, info=self.info, state=self.state))
            while (frame := await frames.get()) is not None:
                yield frame
        finally:
            if self._doors.get(door_id) is frames:
                del self._doors[door_id]
                self._abort_all(door_id)

    def take(self, door_id: str, frame: bytes) -> None:
        """Requests and aborts of a front door that has come; what cannot be served ends at once.

        Raises:
            InvalidRequestError: it is no frame, or too long, or there is no such door.
        """
        if len(frame) > MAX_FRAME_BYTES:
            raise InvalidRequestError(f"a frame of {len(frame)} bytes is too long")
        if door_id not in self._doors:
            raise InvalidRequestError(f"no front door {door_id!r} has come")
        try:
            sent = self._unpacker.decode(frame)
        except (msgspec.DecodeError, ValueError) as error:
            raise InvalidRequestError(f"no frame of a front door: {error}") from error
        later_s = time.monotonic() - sent.sent_s
        for event in sent.events:
            self._take(door_id, event, later_s)

    async def close(self) -> None:
        """End the engine, and what front doors are told."""
        self._telling.cancel()
        for frames in self._doors.values():
            frames.put_nowait(None)
        await self._supervisor.close()

    def _take(self, door_id: str, event: Event | KnowVocabulary, later_s: float) -> None:
        match event:
            case KnowVocabulary():
                if self._vocabulary is None:
                    self._vocabulary = event
                    self._supervisor.send(event)
            case AbortRequest(request_id=request_id):
                own_id = _own_id(door_id, request_id)
                if self._owners.pop(own_id, None) is not None:
                    self._supervisor.send(AbortRequest(request_id=own_id))
            case AddRequest():
                self._add(door_id, event, later_s)

    def _add(self, door_id: str, request: AddRequest, later_s: float) -> None:
        own_id = _own_id(door_id, request.request_id)
        own = msgspec.structs.replace(
            request, request_id=own_id, arrival_time_s=request.arrival_time_s + later_s
        )
        try:
            check_request(own, self.info)
            if own_id in self._owners:
                raise InvalidRequestError(f"there is a request {request.request_id!r} already")
            self._supervisor.check_running()
        except InvalidRequestError as error:
            ended = RequestOutput(
                request_id=request.request_id, finish_reason=FinishReason.ERROR, error=str(error)
            )
            self._tell(door_id, self._brought([ended], []))
            return
        except EngineDeadError:
            self._tell(door_id, Missed(request_id=request.request_id))
            return
        self._owners[own_id] = door_id, request.request_id
        self._supervisor.send(own)

    def _abort_all(self, door_id: str) -> None:
        for own_id in [one for one, owner in self._owners.items() if owner[0] == door_id]:
            del self._owners[own_id]
            self._supervisor.send(AbortRequest(request_id=own_id))

    async def _tell_states(self) -> None:
        while True:
            await asyncio.sleep(_TELL_EVERY_S)
            await self._ask_state()
            if self.state is not None:
                self._tell_all(Tells(state=self.state))

    async def _ask_state(self) -> None:
        try:
            self.state = await self._supervisor.state()
        except EngineDeadError:
            self.state = None

    def _brought(self, outputs: list[RequestOutput], kv_events: list[KVEvent]) -> Brought:
        return Brought(
            outputs=outputs, stats=self._stats, kv_events=kv_events, sent_s=time.monotonic()
        )

    def _tell_all(self, message: Any) -> None:
        for door_id in tuple(self._doors):
            self._tell(door_id, message)

    def _tell(self, door_id: str, message: Any) -> None:
        frames = self._doors[door_id]
        frames.put_nowait(pack(message))
        if frames.qsize() > _MOST_UNREAD:
            logger.error("front door %s reads nothing: it is left", door_id)
            del self._doors[door_id]
            self._abort_all(door_id)
            frames.put_nowait(None)

    # What the supervisor tells: this is its `EngineListener`.

    @property
    def num_unfinished(self) -> int:
        return len(self._owners)

    def engine_is_ready(self) -> None:
        """It knows nothing yet."""
        if self._vocabulary is not None:
            self._supervisor.send(self._vocabulary)
        if self._doors:
            self._supervisor.send(WatchCache())

    def note_begun(self, step: StepBegun) -> None:
        """Nobody asks for it."""

    def take_step(self, step: StepOutputs) -> None:
        """Hand each front door its own."""
        self._stats = step.stats
        outputs_of = defaultdict[str, list[RequestOutput]](list)
        for output in step.outputs:
            owner = self._owners.get(output.request_id)
            if owner is None:
                continue
            door_id, request_id = owner
            if output.finish_reason is not None:
                del self._owners[output.request_id]
            outputs_of[door_id].append(msgspec.structs.replace(output, request_id=request_id))
        for door_id in tuple(self._doors):
            if outputs_of[door_id] or step.kv_events:
                self._tell(door_id, self._brought(outputs_of[door_id], step.kv_events))

    def engine_died(self, retry_after_s: float) -> None:  # noqa: ARG002
        """What it had, front doors may have run elsewhere."""
        self._owners.clear()
        self._stats = EngineStats()
        self._tell_all(Lost())

    def engine_is_given_up(self, reason: str) -> None:
        """Front doors are to leave."""
        logger.info("replica %s ends: %s", self.replica_id, reason)
        for frames in self._doors.values():
            frames.put_nowait(None)


def _own_id(door_id: str, request_id: str) -> str:
    return f"{door_id}/{request_id}"
