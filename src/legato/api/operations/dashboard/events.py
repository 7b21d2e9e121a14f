"""GET /dashboard/events: the engine's activity, live, as server-sent events.

Records hold ids, lengths and times, never a prompt or an output.
"""

import asyncio
import shlex
import time
from collections.abc import AsyncGenerator, Sequence

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from legato.api.context import ApiContext, ContextDep
from legato.api.http.access import ADMINS_ONLY
from legato.api.http.bodies import EventStream, event
from legato.api.http.middleware import WATCH_PATH
from legato.api.operations.settings import SettingsAnswer, describe
from legato.core.config import SchedulerConfig
from legato.core.serve_flags import part_flags
from legato.core.stats import EngineStats
from legato.core.step_record import (
    AnswerRecord,
    EngineRecord,
    LiveRecord,
    Record,
    RequestSent,
    StepRecord,
)
from legato.core.version import __version__
from legato.engine.errors import EngineDeadError
from legato.observe.traces.feed import Subscription

router = APIRouter(include_in_schema=False)

_MAX_RECORDS = 2048
"""The most records that wait for one browser; a slower one loses steps, and gets their number."""

_FRAME_S = 0.05
"""Records that come within this time are sent together: no eye tells them apart."""

_IDLE_S = 1.0
"""The longest time between two events, and the interval of totals."""

_encode = msgspec.json.Encoder().encode

Shown = EngineRecord | LiveRecord


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Sent once to a page. Attributes: `started_s`: when the server began to serve."""

    model: str
    max_model_len: int
    version: str
    started_s: float


class History(msgspec.Struct, frozen=True, kw_only=True):
    """What happened before the page connected, as far as it is still known.

    Attributes:
        unfinished: requests that have come and not ended.
        steps: the latest; the other requests in them have ended.
    """

    unfinished: list[RequestSent]
    steps: Sequence[StepRecord]


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of completions since the server started, as in its metrics.

    Attributes:
        refused: key the reason.
        verdicts: outcomes of promises; key "attained", "missed", "refused" or "waived".
    """

    refused: dict[str, int]
    verdicts: dict[str, int]


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One event.

    Attributes:
        now_s: when it was sent, on the clock of the records.
        stats: after the latest step.
        records: since the last event.
        num_dropped: records lost so far because this client reads too slowly.
        num_restarts: of the engine; each ends all running requests.
        num_unfinished: requests that have come and not ended, including requests that came during
            the running step, which the engine has not seen.
        num_in_flight: HTTP requests being answered that a draining server waits for.
        is_draining: whether new requests are refused because the server is stopping.
        trouble: why there is no engine at the moment; empty if there is one.
        totals: sent at intervals.
        settings: in the first event and whenever they have changed; with them `flags`, which start
            a server with these settings.
        about, history: in the first event.
        replicas: their ids, in the first event and whenever they have changed; empty if the server
            has an engine of its own.
    """

    now_s: float
    stats: EngineStats
    records: list[Shown]
    num_dropped: int
    num_restarts: int
    num_unfinished: int
    num_in_flight: int
    is_draining: bool
    trouble: str
    totals: Totals | UnsetType = UNSET
    settings: SettingsAnswer | UnsetType = UNSET
    flags: str | UnsetType = UNSET
    about: About | UnsetType = UNSET
    history: History | UnsetType = UNSET
    replicas: list[str] | UnsetType = UNSET


@router.get(WATCH_PATH, dependencies=[ADMINS_ONLY])
async def stream_records(context: ContextDep) -> Response:
    """Stream records. The engine makes them while any client listens."""
    return EventStream(_events(context))


async def _events(context: ApiContext) -> AsyncGenerator[bytes, None]:
    page = _Page(context)
    activity = context.engine.activity
    with (
        activity.live.subscribe(_MAX_RECORDS) as live,
        activity.records.subscribe(_MAX_RECORDS) as records,
    ):
        yield event(_encode(page.first()))
        # A draining server does not wait for clients that only watch.
        while not context.lifecycle.is_drained:
            await asyncio.sleep(_FRAME_S)
            update = page.next(live, records)
            if update is not None:
                yield event(_encode(update))


class _Page:
    """Tracks what one page has received."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._engine = context.engine
        self._told: SchedulerConfig | None = None
        self._told_replicas: list[str] | None = None
        self._told_s = 0.0
        self._totals_s = 0.0
        self._was_draining = False

    def first(self) -> Update:
        """Return the page's first update."""
        engine = self._engine
        about = About(
            model=self._context.model_name,
            max_model_len=engine.info.max_model_len,
            version=__version__,
            started_s=self._context.lifecycle.started_s,
        )
        history = History(unfinished=engine.unfinished, steps=engine.activity.recent.steps)
        return replace(self._update([], 0), about=about, history=history)

    def next(self, live: Subscription[LiveRecord], records: Subscription[Record]) -> Update | None:
        """Return an update with what is new; None if there is nothing to send."""
        # Take live records first: a request that has ended by then has begun before.
        shown: list[Shown] = [*live.take_now()]
        # No answer records: they hold their clients' own strings.
        shown += [r for r in records.take_now() if not isinstance(r, AnswerRecord)]
        is_draining = self._context.lifecycle.is_draining
        is_heard = time.monotonic() - self._told_s < _IDLE_S and is_draining == self._was_draining
        if not shown and is_heard and self._engine.settings.asked is self._told:
            return None
        return self._update(shown, live.num_dropped + records.num_dropped)

    def _update(self, shown: list[Shown], num_dropped: int) -> Update:
        engine, lifecycle = self._engine, self._context.lifecycle
        update = Update(
            now_s=time.monotonic(),
            stats=engine.stats,
            records=shown,
            num_dropped=num_dropped,
            num_restarts=engine.num_restarts,
            num_unfinished=engine.num_unfinished,
            num_in_flight=lifecycle.num_in_flight,
            is_draining=lifecycle.is_draining,
            trouble=self._trouble(),
        )
        if update.now_s - self._totals_s >= _IDLE_S:
            self._totals_s = update.now_s
            update = replace(update, totals=self._totals())
        if (replicas := list(engine.replicas)) != self._told_replicas:
            self._told_replicas = replicas
            update = replace(update, replicas=replicas)
        if engine.settings.asked is not self._told:
            self._told = engine.settings.asked
            flags = shlex.join(part_flags(self._told))
            update = replace(update, settings=describe(engine), flags=flags)
        self._told_s, self._was_draining = update.now_s, update.is_draining
        return update

    def _trouble(self) -> str:
        try:
            self._engine.check_running()
        except EngineDeadError as error:
            return str(error)
        return ""

    def _totals(self) -> Totals:
        metrics = self._context.metrics
        return Totals(refused=metrics.requests.num_refused(), verdicts=metrics.slos.num_verdicts())
