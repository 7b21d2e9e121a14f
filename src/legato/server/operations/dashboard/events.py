"""GET /dashboard/events: what the engine does, live, as server-sent events.

Records hold ids, lengths and times, never a prompt or an output.
"""

import asyncio
import time
from collections.abc import AsyncGenerator

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from msgspec import UNSET, UnsetType

from legato.core.config import SchedulerConfig
from legato.core.stats import EngineStats
from legato.core.step_record import AnswerRecord, EngineRecord
from legato.observe.traces.feed import Subscription
from legato.server.context import Context, ContextDep
from legato.server.http.bodies import EventStream, event
from legato.server.operations.settings import SettingsAnswer, describe

router = APIRouter(include_in_schema=False)

_MAX_RECORDS = 2048
"""That may wait for one browser; one that is slower loses steps, and is told how many."""

_FRAME_S = 0.05
"""Records are sent together that come within this, since no eye tells them apart."""

_IDLE_S = 1.0
"""The longest that a browser hears nothing."""

_encode = msgspec.json.Encoder().encode


class About(msgspec.Struct, frozen=True):
    """What a page needs to know once."""

    model: str
    max_model_len: int


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One event.

    Attributes:
        now_s: when it was sent, on the clock of the records.
        stats: after the latest step.
        records: since the last event.
        num_dropped: records lost so far because this client reads too slowly.
        num_restarts: of the engine, under which all that ran has ended.
        about: in the first event.
        settings: in the first event and whenever they have changed.
    """

    now_s: float
    stats: EngineStats
    records: list[EngineRecord]
    num_dropped: int
    num_restarts: int
    about: About | UnsetType = UNSET
    settings: SettingsAnswer | UnsetType = UNSET


@router.get("/dashboard/events")
async def stream_records(context: ContextDep) -> Response:
    """Records are made from the first listener on until the last has gone."""
    return EventStream(_events(context))


async def _events(context: Context) -> AsyncGenerator[bytes, None]:
    client = context.client
    about: About | UnsetType = About(context.model_name, client.info.max_model_len)
    told: SchedulerConfig | None = None
    records: list[EngineRecord] = []
    with client.records.subscribe(_MAX_RECORDS) as subscription:
        # A server that drains waits for its streams, and so for this one.
        while not context.lifecycle.is_draining:
            in_effect = client.scheduler_config
            update = Update(
                now_s=time.monotonic(),
                stats=client.stats,
                records=records,
                num_dropped=subscription.num_dropped,
                num_restarts=client.num_restarts,
                about=about,
                settings=UNSET if in_effect is told else describe(client),
            )
            yield event(_encode(update))
            about, told = UNSET, in_effect
            await asyncio.sleep(_FRAME_S)
            records = await _records(subscription)


async def _records(subscription: Subscription) -> list[EngineRecord]:
    """What the engine did; of answers, which hold words of their clients, nothing."""
    try:
        records = await asyncio.wait_for(subscription.take(), _IDLE_S)
    except TimeoutError:
        return []
    return [record for record in records if not isinstance(record, AnswerRecord)]
