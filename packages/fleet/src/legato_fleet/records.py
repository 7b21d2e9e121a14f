"""Converts replicas' records for front doors."""

import math
import time
from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from legato.core.outputs import FinishReason, RequestOutput
from legato.core.step_record import (
    EngineRecord,
    RequestArrived,
    RequestEnded,
    StepBegun,
    StepRecord,
)

_Record = TypeVar("_Record", bound=EngineRecord | StepBegun)

_DRIFT = 1e-4
"""Most drift of two clocks, in seconds a second; many times that of quartz."""

_TIMES: dict[str, tuple[str, ...]] = {
    "StepRecord": ("planned_s", "started_s", "ended_s"),
    "StepBegun": ("planned_s",),
    "RequestArrived": ("arrived_s", "taken_s"),
    "GrammarReady": ("ready_s",),
    "BlocksFetched": ("begun_s", "ended_s"),
    "RequestEnded": ("ended_s",),
}
"""Key the type of a record; value its fields that are times."""


class ForeignClock:
    """Estimates from messages how far another machine's clock is behind ours.

    Each message takes time to arrive, so the fastest one gives the best estimate.
    """

    def __init__(self) -> None:
        self._behind_s = math.inf
        self._noted_s = 0.0

    def note(self, sent_s: float, now_s: float) -> float:
        """Note a message sent at that time; return what to add to the other clock's times."""
        drifted_s = self._behind_s + _DRIFT * (now_s - self._noted_s)
        self._behind_s = min(drifted_s, now_s - sent_s)
        self._noted_s = now_s
        return self._behind_s


def on_our_clock(record: _Record, behind_s: float) -> _Record:
    """Convert a record's times. Args: behind_s: as `ForeignClock.note` returns."""
    fields = _TIMES[type(record).__name__]
    return replace(record, **{field: getattr(record, field) + behind_s for field in fields})


def output_on_our_clock(output: RequestOutput, behind_s: float) -> RequestOutput:
    """Convert an output's time, likewise."""
    if output.scheduled_s is None:
        return output
    return replace(output, scheduled_s=output.scheduled_s + behind_s)


def of_replica(record: _Record, replica_id: str, id_of: Callable[[str], str]) -> _Record:
    """Return an engine's record as a replica's. Args: id_of: as of `renamed`."""
    renamed_record = renamed(record, id_of)
    if isinstance(renamed_record, StepRecord | StepBegun | RequestArrived):
        return replace(renamed_record, replica_id=replica_id)
    return renamed_record


def renamed(record: _Record, id_of: Callable[[str], str]) -> _Record:
    """Return a record with other request ids. Args: id_of: returns the new id of an old one."""
    match record:
        case StepRecord():
            return replace(
                record,
                chunks=tuple(replace(c, request_id=id_of(c.request_id)) for c in record.chunks),
                admitted={id_of(one): num for one, num in record.admitted.items()},
                short_hits={id_of(one): hit for one, hit in record.short_hits.items()},
                preempted=tuple(map(id_of, record.preempted)),
                failed=tuple(map(id_of, record.failed)),
            )
        case StepBegun():
            prefill_tokens = {id_of(one): num for one, num in record.prefill_tokens.items()}
            return replace(record, prefill_tokens=prefill_tokens)
        case _:
            return replace(record, request_id=id_of(record.request_id))


def lost(request_id: str, num_output_tokens: int, why: str) -> RequestEnded:
    """Return the last record of a request whose replica is gone."""
    return RequestEnded(
        request_id=request_id,
        ended_s=time.monotonic(),
        finish_reason=FinishReason.ERROR,
        num_output_tokens=num_output_tokens,
        num_cached_tokens=0,
        error=why,
    )
