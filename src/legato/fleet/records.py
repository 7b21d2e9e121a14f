"""Records of replicas, as front doors are to see them."""

import math
import time
from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from legato.core.outputs import FinishReason
from legato.core.step_record import (
    EngineRecord,
    RequestArrived,
    RequestEnded,
    StepBegun,
    StepRecord,
)

_Record = TypeVar("_Record", bound=EngineRecord | StepBegun)

_DRIFT = 1e-4
"""Seconds a second, by which two clocks may come to differ more; many times what quartz does."""

_TIMES: dict[str, tuple[str, ...]] = {
    "StepRecord": ("planned_s", "started_s", "ended_s"),
    "StepBegun": ("planned_s",),
    "RequestArrived": ("arrived_s", "taken_s"),
    "GrammarReady": ("ready_s",),
    "RequestEnded": ("ended_s",),
}
"""Key what a record is; value the fields that are times."""


class ForeignClock:
    """How far another machine's clock is behind ours, by the messages that come from there.

    Each is on its way for a while, so the one that came fastest tells best.
    """

    def __init__(self) -> None:
        self._behind_s = math.inf
        self._noted_s = 0.0

    def note(self, sent_s: float, now_s: float) -> float:
        """A message of that time there has come; returns what to add to times of there."""
        drifted_s = self._behind_s + _DRIFT * (now_s - self._noted_s)
        self._behind_s = min(drifted_s, now_s - sent_s)
        self._noted_s = now_s
        return self._behind_s


def on_our_clock(record: _Record, behind_s: float) -> _Record:
    """Args: behind_s: as `ForeignClock.note` tells."""
    fields = _TIMES[type(record).__name__]
    return replace(record, **{field: getattr(record, field) + behind_s for field in fields})


def of_replica(record: _Record, replica_id: str, id_of: Callable[[str], str]) -> _Record:
    """An engine's record as that of a replica. Args: id_of: as of `renamed`."""
    renamed_record = renamed(record, id_of)
    if isinstance(renamed_record, StepRecord | StepBegun | RequestArrived):
        return replace(renamed_record, replica_id=replica_id)
    return renamed_record


def renamed(record: _Record, id_of: Callable[[str], str]) -> _Record:
    """The same with other ids of requests. Args: id_of: what one is called then."""
    match record:
        case StepRecord():
            return replace(
                record,
                chunks=tuple(replace(c, request_id=id_of(c.request_id)) for c in record.chunks),
                admitted={id_of(one): num for one, num in record.admitted.items()},
                preempted=tuple(map(id_of, record.preempted)),
                failed=tuple(map(id_of, record.failed)),
            )
        case StepBegun():
            prefill_tokens = {id_of(one): num for one, num in record.prefill_tokens.items()}
            return replace(record, prefill_tokens=prefill_tokens)
        case _:
            return replace(record, request_id=id_of(record.request_id))


def lost(request_id: str, num_output_tokens: int, why: str) -> RequestEnded:
    """What the replica that is gone cannot tell."""
    return RequestEnded(
        request_id=request_id,
        ended_s=time.monotonic(),
        finish_reason=FinishReason.ERROR,
        num_output_tokens=num_output_tokens,
        num_cached_tokens=0,
        error=why,
    )
