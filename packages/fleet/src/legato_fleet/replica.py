"""One engine of a fleet, which serves the requests of several front doors."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec

from legato.core.config import EngineConfig, SchedulerConfig
from legato.core.errors import ConfigError, InvalidRequestError
from legato.core.kv_events import KVEvent
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.replica_state import ReplicaState
from legato.core.request import AbortRequest, AddRequest
from legato.core.slo import SloClass
from legato.core.stats import EngineStats
from legato.core.step_record import EngineRecord, StepBegun
from legato.engine.client.kv_tickets import KVTransferParams, Tickets
from legato.engine.client.requests import check_request
from legato.engine.client.settings import RunningSettings
from legato.engine.errors import EngineDeadError
from legato.engine.process.channel import pack, unpacker
from legato.engine.process.engine_messages import (
    EngineInfo,
    ForgetCache,
    Reconfigure,
    SetAnnouncing,
    SetRecording,
    SetVocabulary,
    StepOutputs,
    WatchCache,
)
from legato.engine.process.engine_process import EngineProcess
from legato.engine.process.supervisor import EngineSupervisor
from legato_fleet.records import of_replica
from legato_fleet.replica_messages import (
    MAX_FRAME_BYTES,
    Begun,
    Brought,
    ChangeSettings,
    Joined,
    Lost,
    Missed,
    Sent,
    Tells,
    Ticketed,
    ToReplica,
)
from legato_fleet.routing.replica_view import STATE_EVERY_S
from legato_fleet.routing.request import Role

logger = logging.getLogger(__name__)

_MOST_UNREAD = 4096
"""Frames that may wait for a front door; one that is further behind is disconnected."""
_MOST_SILENT_S = 60.0
"""A front door that is silent for longer counts as dead."""


class _Door:
    """A joined front door.

    Attributes:
        frames: to send to it; None at the end.
        records: of steps, to send with the next frame.
        is_recording, is_announcing: whether it has asked for all records, and for steps that begin.
        heard_s: when it last sent anything.
    """

    def __init__(self) -> None:
        self.frames = asyncio.Queue[bytes | None]()
        self.records: list[EngineRecord] = []
        self.is_recording = self.is_announcing = False
        self.heard_s = time.monotonic()


class Replica:
    """An engine process with its supervisor, and the front doors that use it.

    Attributes:
        replica_id: unique, never reused.
        info: of the engine.
        state: the engine's latest; None before the first, and while there is no engine.
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
        self._doors: dict[str, _Door] = {}  # key: door id
        self._owners: dict[str, tuple[str, str]] = {}
        """Key the engine's request id, value the door's id and the request's id there."""
        self._unpacker = unpacker(Sent)
        self._stats = EngineStats()
        self._started_s = time.time()
        self._vocabulary: SetVocabulary | None = None
        self._is_recording = self._is_announcing = False  # for any front door
        self._role: Role = config.transfer.kv_role or "both"
        self._tickets = Tickets(config.transfer, info.transfer, is_from_router=True)
        self._supervisor = EngineSupervisor(
            config, engine, self, timeout_s=timeout_s, program=program
        )
        self._settings = RunningSettings(config.scheduler, info)
        self._settings.watch(lambda now: self._supervisor.reconfigure(now.resolved))
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
            timeout_s: as of `EngineSupervisor`.
            program: as of `EngineProcess.starting`.

        Raises:
            ConfigError: the settings or the checkpoint cannot be served.
            EngineDeadError: the process died while loading.
        """
        async with EngineProcess.starting(config, program) as engine:
            info = await engine.ready()
        return cls(replica_id, config, engine, info, timeout_s=timeout_s, program=program)

    @property
    def classes(self) -> dict[str, SloClass]:
        """Its promises; key the class of service."""
        return self._settings.asked.classes

    def check_running(self) -> None:
        """Raises `EngineDeadError` if there is no engine, and will be none."""
        if not self._supervisor.is_alive:
            raise EngineDeadError(self._supervisor.death)

    async def attach(self, door_id: str) -> AsyncGenerator[bytes]:
        """Join a front door; yields packed `FromReplica` until either side ends.

        Its unfinished requests are aborted when it leaves.
        """
        door = self._doors[door_id] = _Door()
        self._supervisor.send(WatchCache())  # repeats the whole cache to all doors
        try:
            await self._ask_state()
            yield pack(
                Joined(
                    replica_id=self.replica_id,
                    role=self._role,
                    info=self.info,
                    state=self.state,
                    started_s=self._started_s,
                )
            )
            while (frame := await door.frames.get()) is not None:
                yield frame
        finally:
            if self._doors.get(door_id) is door:
                self._leave(door_id)

    def take(self, door_id: str, frame: bytes) -> None:
        """Take a frame from a joined front door; requests that cannot be served end at once.

        Raises:
            InvalidRequestError: it is no frame, or too long; there is no such door; or its settings
                are invalid.
        """
        if len(frame) > MAX_FRAME_BYTES:
            raise InvalidRequestError(f"a frame of {len(frame)} bytes is too long")
        if door_id not in self._doors:
            raise InvalidRequestError(f"no front door {door_id!r} has come")
        try:
            sent = self._unpacker.decode(frame)
        except (msgspec.DecodeError, ValueError) as error:
            raise InvalidRequestError(f"no frame of a front door: {error}") from error
        now_s = self._doors[door_id].heard_s = time.monotonic()
        delay_change_s = now_s - sent.sent_s
        for event in sent.events:
            self._take(door_id, event, delay_change_s)

    async def close(self) -> None:
        """End the engine, and the messages to front doors."""
        self._telling.cancel()
        self._end_doors()
        await self._supervisor.close()

    def _take(self, door_id: str, event: ToReplica, delay_change_s: float) -> None:
        match event:
            case SetVocabulary():
                if self._vocabulary is None:
                    self._vocabulary = event
                    self._supervisor.send(event)
            case AbortRequest(request_id=request_id):
                own_id = _own_id(door_id, request_id)
                if self._owners.pop(own_id, None) is not None:
                    self._supervisor.send(AbortRequest(request_id=own_id))
            case AddRequest():
                self._add(door_id, event, None, delay_change_s)
            case Ticketed(request=request, ticket=ticket):
                self._add(door_id, request, ticket, delay_change_s)
            case SetRecording() | SetAnnouncing():
                self._change_watch(self._doors[door_id], event)
            case ChangeSettings(scheduler):
                self._change(scheduler)
            case ForgetCache():
                self._supervisor.send(event)

    def _change_watch(self, door: _Door, event: SetRecording | SetAnnouncing) -> None:
        if isinstance(event, SetRecording):
            door.is_recording = event.is_on
        else:
            door.is_announcing = event.is_on
        self._watch()

    def _watch(self) -> None:
        """Have the engine report as much as any front door asks for."""
        doors = self._doors.values()
        is_recording = any(door.is_recording for door in doors)
        if is_recording != self._is_recording:
            self._is_recording = is_recording
            self._supervisor.send(SetRecording(is_recording))
        is_announcing = any(door.is_announcing for door in doors)
        if is_announcing != self._is_announcing:
            self._is_announcing = is_announcing
            self._supervisor.send(SetAnnouncing(is_announcing))

    def _change(self, scheduler: SchedulerConfig) -> None:
        before = self._settings.asked
        if scheduler == before:
            return
        if (scheduler.max_num_seqs, scheduler.classes.keys()) != (
            before.max_num_seqs,
            before.classes.keys(),
        ):
            raise InvalidRequestError("an engine that runs keeps max_num_seqs and its classes")
        try:
            resolved = self._settings.resolve(scheduler)
        except ConfigError as error:
            raise InvalidRequestError(f"no settings of this engine: {error}") from error
        self._settings.change(scheduler, resolved)

    def _add(
        self,
        door_id: str,
        request: AddRequest,
        ticket: KVTransferParams | None,
        delay_change_s: float,
    ) -> None:
        own_id = _own_id(door_id, request.request_id)
        own = msgspec.structs.replace(
            request, request_id=own_id, arrival_time_s=request.arrival_time_s + delay_change_s
        )
        try:
            check_request(own, self.info)
            if own_id in self._owners:
                raise InvalidRequestError(f"there is a request {request.request_id!r} already")
            kv_transfer = self._tickets.transfer(ticket)
            self._supervisor.check_running()
        except InvalidRequestError as error:
            ended = RequestOutput(
                request_id=request.request_id, finish_reason=FinishReason.ERROR, error=str(error)
            )
            self._bring(door_id, [ended])
            return
        except EngineDeadError:
            self._tell(door_id, Missed(request_id=request.request_id))
            return
        self._owners[own_id] = door_id, request.request_id
        self._supervisor.send(msgspec.structs.replace(own, kv_transfer=kv_transfer))

    def _leave(self, door_id: str) -> None:
        """Forget a front door, and abort its requests."""
        del self._doors[door_id]
        self._watch()
        for own_id in [one for one, owner in self._owners.items() if owner[0] == door_id]:
            del self._owners[own_id]
            self._supervisor.send(AbortRequest(request_id=own_id))

    async def _tell_states(self) -> None:
        while True:
            await asyncio.sleep(STATE_EVERY_S)
            await self._ask_state()
            if self.state is not None:
                self._tell_all(Tells(state=self.state, transfer=self.info.transfer))
            for door_id in [one for one, door in self._doors.items() if door.records]:
                self._bring(door_id, [])
            self._leave_the_silent()

    async def _ask_state(self) -> None:
        try:
            self.state = await self._supervisor.state()
        except EngineDeadError:
            self.state = None

    def _bring(
        self, door_id: str, outputs: list[RequestOutput], kv_events: Sequence[KVEvent] = ()
    ) -> None:
        door = self._doors[door_id]
        records, door.records = door.records, []
        prefix = _own_id(door_id, "")
        records = [of_replica(one, self.replica_id, _without(prefix)) for one in records]
        brought = Brought(
            outputs=outputs,
            stats=self._stats,
            kv_events=list(kv_events),
            sent_s=time.monotonic(),
            records=records,
        )
        self._tell(door_id, brought)

    def _tell_all(self, message: Any) -> None:
        for door_id in tuple(self._doors):
            self._tell(door_id, message)

    def _tell(self, door_id: str, message: Any) -> None:
        frames = self._doors[door_id].frames
        frames.put_nowait(pack(message))
        if frames.qsize() > _MOST_UNREAD:
            logger.error("front door %s reads nothing: it is left", door_id)
            self._send_away(door_id)

    def _leave_the_silent(self) -> None:
        since_s = time.monotonic() - _MOST_SILENT_S
        for door_id in [one for one, door in self._doors.items() if door.heard_s < since_s]:
            logger.error("front door %s says nothing: it is left", door_id)
            self._send_away(door_id)

    def _send_away(self, door_id: str) -> None:
        frames = self._doors[door_id].frames
        self._leave(door_id)
        frames.put_nowait(None)

    def _end_doors(self) -> None:
        for door in self._doors.values():
            door.frames.put_nowait(None)

    # `EngineListener`: called by the supervisor.

    def engine_is_ready(self, info: EngineInfo) -> None:
        """Set a new engine up; its address for fetching blocks may be new."""
        self.info = info
        if self._vocabulary is not None:
            self._supervisor.send(self._vocabulary)
        if info.scheduler != self._settings.resolved:  # they changed while it was loading
            self._supervisor.send(Reconfigure(self._settings.resolved))
        if self._is_recording:
            self._supervisor.send(SetRecording(True))
        if self._is_announcing:
            self._supervisor.send(SetAnnouncing(True))
        if self._doors:
            self._supervisor.send(WatchCache())

    def note_begun(self, step: StepBegun) -> None:
        """Report a step that begins to the front doors that asked for it."""
        for door_id in [one for one, door in self._doors.items() if door.is_announcing]:
            prefix = _own_id(door_id, "")
            told = of_replica(step, self.replica_id, _without(prefix))
            self._tell(door_id, Begun(step=told, sent_s=time.monotonic()))

    def take_step(self, step: StepOutputs) -> None:
        """Send each front door its own outputs.

        Records alone are sent at once only to front doors that watch.
        """
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
        for door_id, door in tuple(self._doors.items()):
            door.records += step.records
            if outputs_of[door_id] or step.kv_events or door.is_recording:
                self._bring(door_id, outputs_of[door_id], step.kv_events)

    def engine_died(self, retry_after_s: float) -> None:  # noqa: ARG002
        """Report the loss; front doors may rerun the requests elsewhere."""
        self._owners.clear()
        self._stats = EngineStats()
        self._tell_all(Lost())

    def engine_is_given_up(self, reason: str) -> None:
        """Disconnect all front doors."""
        logger.info("replica %s ends: %s", self.replica_id, reason)
        self._end_doors()


def _own_id(door_id: str, request_id: str) -> str:
    return f"{door_id}/{request_id}"


def _without(prefix: str) -> Callable[[str], str]:
    return lambda own_id: own_id.removeprefix(prefix)
