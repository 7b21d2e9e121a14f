"""The updates sent to a page of the dashboard."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from legato.core.stats import EngineStats
from legato.core.step_record import EngineRecord, LiveRecord, RequestSent, StepRecord
from legato.server.operations.settings import SettingsAnswer

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
        num_unfinished: requests that have come and not ended, including those that came during
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
