"""What a front door and a replica tell each other, in frames of msgpack.

A front door takes requests from clients and sends them to replicas; there may be several. Clocks of
machines differ: who sends says what its own shows, and who receives counts from there.
"""

import msgspec

from legato.core.config import SchedulerConfig
from legato.core.kv_events import KVEvent
from legato.core.outputs import RequestOutput
from legato.core.replica_state import ReplicaState
from legato.core.request import AddRequest, Event
from legato.core.stats import EngineStats
from legato.core.step_record import EngineRecord, StepBegun
from legato.engine.frontend.kv_tickets import KVTransferParams
from legato.engine.process.messages import (
    EngineInfo,
    KnowVocabulary,
    SetAnnouncing,
    SetRecording,
    TransferAddress,
)
from legato.routing.request import Role

MAX_FRAME_BYTES = 64 * 2**20
"""To a replica; more is refused unread."""


class ChangeSettings(msgspec.Struct, frozen=True, tag=True):
    """To a replica: plan by these settings, which are as they were asked for."""

    scheduler: SchedulerConfig


class Ticketed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a front door: one half of a request, whose other half is another replica's.

    Attributes:
        ticket: what becomes of its prompt's blocks, of which the request itself says nothing.
    """

    request: AddRequest
    ticket: KVTransferParams


ToReplica = Event | KnowVocabulary | SetRecording | SetAnnouncing | ChangeSettings | Ticketed


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """From a front door.

    Attributes:
        events: in their order, with request ids that this front door has not used before.
        sent_s: when, on the clock of the requests' `arrival_time_s`.
    """

    events: list[ToReplica]
    sent_s: float


class Joined(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a replica, first.

    Attributes:
        replica_id: no other has had it.
        role: what it does of requests.
        info: of its engine.
        state: in which that is; None where it is just being started again.
        started_s: when it began to serve, in Unix time.
    """

    replica_id: str
    role: Role
    info: EngineInfo
    state: ReplicaState | None
    started_s: float


class Brought(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a replica: what steps brought of this front door's requests.

    Attributes:
        stats: of the whole engine.
        kv_events: what became of its cached blocks, whosesoever.
        records: of its steps, and where a front door watches, of requests that came and ended;
            other front doors' requests have ids that this one knows nothing of.
        sent_s: when, on the clock of `RequestOutput.scheduled_s` and of the records.
    """

    outputs: list[RequestOutput]
    stats: EngineStats
    kv_events: list[KVEvent]
    sent_s: float
    records: list[EngineRecord] = []


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a replica, to front doors that watch: it is about to compute a step.

    Attributes:
        sent_s: as in `Brought`.
    """

    step: StepBegun
    sent_s: float


class Tells(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a replica, every now and then: in what state it is.

    Attributes:
        transfer: where its engine is asked for blocks, which differs from one engine to the next;
            None where it hands over none.
    """

    state: ReplicaState
    transfer: TransferAddress | None = None


class Lost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a replica: its engine died, with all requests that it had.

    It starts another, and tells its state once that is there.
    """


class Missed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a replica: a request came while there was no engine, and is to be run elsewhere."""

    request_id: str


FromReplica = Joined | Brought | Begun | Tells | Lost | Missed
