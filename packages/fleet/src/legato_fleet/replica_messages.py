"""Messages between a front door and a replica, in frames of msgpack.

A front door takes requests from clients and sends them to replicas; there may be several. Clocks of
machines differ, so a sender states its own time, and the receiver converts times from it.
"""

import msgspec

from legato.core.config import SchedulerConfig
from legato.core.kv_events import KVEvent
from legato.core.outputs import RequestOutput
from legato.core.replica_state import ReplicaState
from legato.core.request import AddRequest, Event
from legato.core.stats import EngineStats
from legato.core.step_record import EngineRecord, StepBegun
from legato.engine.client.kv_tickets import KVTransferParams
from legato.engine.process.engine_messages import (
    EngineInfo,
    ForgetCache,
    SetAnnouncing,
    SetRecording,
    SetVocabulary,
    TransferAddress,
)
from legato_fleet.routing.request import Role

MAX_FRAME_BYTES = 64 * 2**20
"""The largest frame to a replica; a larger one is refused without decoding."""


class ChangeSettings(msgspec.Struct, frozen=True, tag=True):
    """To a replica: use these settings, whose "auto" is unresolved."""

    scheduler: SchedulerConfig


class Ticketed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a front door: one half of a request; another replica has the other half.

    Attributes:
        ticket: how the prompt's blocks move; the request itself does not say.
    """

    request: AddRequest
    ticket: KVTransferParams


ToReplica = (
    Event | SetVocabulary | SetRecording | SetAnnouncing | ChangeSettings | ForgetCache | Ticketed
)


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """A frame from a front door.

    Attributes:
        events: in order, with request ids that this front door has not used before.
        sent_s: when, on the clock of the requests' `arrival_time_s`.
    """

    events: list[ToReplica]
    sent_s: float


class Joined(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a replica, first.

    Attributes:
        replica_id: unique, never reused.
        role: the part of each request that it computes.
        info: of its engine.
        state: of its engine; None while the engine is being restarted.
        started_s: when it began to serve, in Unix time.
    """

    replica_id: str
    role: Role
    info: EngineInfo
    state: ReplicaState | None
    started_s: float


class Brought(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a replica: the outputs of steps for this front door's requests.

    Attributes:
        stats: of the whole engine.
        kv_events: of its cache, for all front doors' requests.
        records: of its steps and, for a front door that watches, of requests that came and ended;
            other front doors' requests have ids that mean nothing to this one.
        sent_s: when, on the clock of `RequestOutput.scheduled_s` and of the records.
    """

    outputs: list[RequestOutput]
    stats: EngineStats
    kv_events: list[KVEvent]
    sent_s: float
    records: list[EngineRecord] = []


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a replica, to front doors that watch: a step is about to begin.

    Attributes:
        sent_s: as in `Brought`.
    """

    step: StepBegun
    sent_s: float


class Tells(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a replica, at intervals: its state.

    Attributes:
        transfer: the address for fetching blocks from its engine, which changes with each engine;
            None if it sends no blocks.
    """

    state: ReplicaState
    transfer: TransferAddress | None = None


class Lost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a replica: its engine died, and all its requests with it.

    It starts another, and reports its state once the new engine runs.
    """


class Missed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a replica: a request came while there was no engine, and must be run elsewhere."""

    request_id: str


FromReplica = Joined | Brought | Begun | Tells | Lost | Missed
