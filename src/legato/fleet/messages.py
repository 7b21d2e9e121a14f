"""What a front door and a replica tell each other, in frames of msgpack.

A front door takes requests from clients and sends them to replicas; there may be several. Clocks of
machines differ: who sends says what its own shows, and who receives counts from there.
"""

import msgspec

from legato.core.kv_events import KVEvent
from legato.core.outputs import RequestOutput
from legato.core.replica_state import ReplicaState
from legato.core.request import Event
from legato.core.stats import EngineStats
from legato.engine.process.messages import EngineInfo, KnowVocabulary

MAX_FRAME_BYTES = 64 * 2**20
"""To a replica; more is refused unread."""


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """From a front door.

    Attributes:
        events: in their order, with request ids that this front door has not used before.
        sent_s: when, on the clock of the requests' `arrival_time_s`.
    """

    events: list[Event | KnowVocabulary]
    sent_s: float


class Joined(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a replica, first.

    Attributes:
        replica_id: no other has had it.
        info: of its engine.
        state: in which that is; None where it is just being started again.
    """

    replica_id: str
    info: EngineInfo
    state: ReplicaState | None


class Brought(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a replica: what a step brought of this front door's requests.

    Attributes:
        stats: of the whole engine.
        kv_events: what became of its cached blocks, whosesoever.
        sent_s: when, on the clock of `RequestOutput.scheduled_s`.
    """

    outputs: list[RequestOutput]
    stats: EngineStats
    kv_events: list[KVEvent]
    sent_s: float


class Tells(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a replica, every now and then: in what state it is."""

    state: ReplicaState


class Lost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a replica: its engine died, with all requests that it had.

    It starts another, and tells its state once that is there.
    """


class Missed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a replica: a request came while there was no engine, and is to be run elsewhere."""

    request_id: str


FromReplica = Joined | Brought | Tells | Lost | Missed
