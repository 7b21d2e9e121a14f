"""Sweeps: a workload under one load after another, and the throughput at each."""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from enum import StrEnum

import msgspec
import numpy as np

from legato_lab.simulation.record import RequestRecord
from legato_lab.simulation.workload import Workload, WorkloadRequest
from legato_lab.workload.choice import WorkloadChoice

POINT_S = 60.0
_LEAST_REQUESTS = 20
_ROUNDS = 2
_NUM_DRAWN = 1000


class LoadKind(StrEnum):
    """The unit of a load."""

    RATE = "rate"
    CONCURRENCY = "concurrency"

    def describe(self, load: float) -> str:
        """Describe a load for people."""
        return f"{load:g}/s" if self is LoadKind.RATE else f"{load:g} in flight"


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput under the full load: requests had begun to end, and others were still sent.

    Attributes:
        requests_per_s: that finished.
        output_tokens_per_s: of requests that finished, even later.
    """

    requests_per_s: float
    output_tokens_per_s: float

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> "Throughput":
        """Measure from the median E2E on, but at least half of the time; 0 without any time."""
        finished = [record for record in records if record.status == "ok"]
        sent_s = [record.sent_s for record in records]
        start_s, end_s = min(sent_s, default=0.0), max(sent_s, default=0.0)
        median_s = float(np.median([record.e2e_s or 0.0 for record in finished] or [0.0]))
        start_s += min(median_s, (end_s - start_s) / 2)
        window_s = end_s - start_s
        if window_s <= 0.0:
            return cls(requests_per_s=0.0, output_tokens_per_s=0.0)
        num_requests = sum(start_s < record.last_event_s <= end_s for record in finished)
        num_tokens = sum(_num_tokens(record, start_s, end_s) for record in finished)
        return cls(
            requests_per_s=num_requests / window_s, output_tokens_per_s=num_tokens / window_s
        )


def at_rate(choice: WorkloadChoice, rate_per_s: float) -> Workload:
    """Return the choice at a rate, for `POINT_S` unless it sets a duration or a number of requests.

    Raises:
        ConfigError: as `WorkloadChoice.load`.
    """
    num_requests = choice.num_requests
    if num_requests is None and choice.sample is None:
        wanted_s = choice.duration_s or POINT_S
        num_requests = max(_LEAST_REQUESTS, math.ceil(rate_per_s * wanted_s))
    return msgspec.structs.replace(
        choice, rate_per_s=rate_per_s, num_requests=num_requests, duration_s=None
    ).load()


def closed_loop(choice: WorkloadChoice, concurrency: int) -> Iterator[WorkloadRequest]:
    """Repeat the choice's requests, to be sent with `concurrency` in flight.

    They continue for its duration, or for `POINT_S` if it sets no number either, and until most of
    them were sent after others had ended.

    Raises:
        ConfigError: as `WorkloadChoice.load`.
    """
    num_requests = max(choice.num_requests or 0, _ROUNDS * concurrency + 1)
    wanted_s = choice.duration_s or (0.0 if choice.num_requests else POINT_S)
    some = msgspec.structs.replace(
        choice, num_requests=choice.num_requests or _NUM_DRAWN, duration_s=None
    )
    workload = [msgspec.structs.replace(request, arrival_s=0.0) for request in some.load()]
    return itertools.takewhile(_Lasting(num_requests, wanted_s), itertools.cycle(workload))


class _Lasting:
    """Called once for each request; returns whether to send it."""

    def __init__(self, num_requests: int, duration_s: float) -> None:
        self._num_left = num_requests
        self._end_s = time.perf_counter() + duration_s

    def __call__(self, _request: WorkloadRequest) -> bool:
        self._num_left -= 1
        return self._num_left >= 0 or time.perf_counter() < self._end_s


def _num_tokens(record: RequestRecord, start_s: float, end_s: float) -> float:
    """Return the share of a record's tokens that came in between.

    A server may send several tokens at once.
    """
    num_in_between = sum(start_s < at_s <= end_s for at_s in record.token_times_s)
    return record.num_tokens * num_in_between / max(1, len(record.token_times_s))
