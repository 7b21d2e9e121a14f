"""What a page of the dashboard is told."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from legato.core.stats import EngineStats
from legato.core.step_record import EngineRecord, LiveRecord, RequestSent, StepRecord
from legato.server.operations.settings import SettingsAnswer

Shown = EngineRecord | LiveRecord


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What a page needs to know once. Attributes: `started_s`: when the server began to serve."""

    model: str
    max_model_len: int
    version: str
    started_s: float


class History(msgspec.Struct, frozen=True, kw_only=True):
    """What happened before the page came, as far as it is still known.

    Attributes:
        unfinished: requests that have come and not ended.
        steps: the latest, whose other requests have ended.
    """

    unfinished: list[RequestSent]
    steps: Sequence[StepRecord]


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of completions since the server began to serve, as in its metrics.

    Attributes:
        refused: key the reason.
        verdicts: what became of their promises; key "attained", "missed", "refused" or "waived".
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
        num_restarts: of the engine, under which all that ran has ended.
        num_unfinished: requests that have come and not ended; the engine has not seen those that
            came during the step that runs.
        num_in_flight: HTTP requests being answered, of those that a server which drains waits for.
        is_draining: whether new requests are refused, because the server is to end.
        trouble: why there is no engine just now; empty where there is one.
        totals: now and then.
        settings: in the first event and whenever they have changed; with them `flags`, which start
            a server with these.
        about, history: in the first event.
        replicas: ids of those that there are, in the first event and whenever they have changed;
            none where the server has an engine of its own.
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
