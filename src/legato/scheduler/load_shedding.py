"""Decides whether a new request may wait, and which requests are refused for it."""

import itertools
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from legato.core.config import SchedulerConfig
from legato.core.outputs import FinishReason, RefusalReason, RequestOutput
from legato.core.request import Request
from legato.scheduler.forecast import Forecast, Lateness
from legato.scheduler.queues import Queues
from legato.scheduler.tenants import Tenant

_DISPLACED = "requests have come that go before: of more priority, or of tenants with less waiting"
_MOST_DISPLACED = 8
"""Most waiting requests that one request may displace."""

_MOST_DUE = 64
"""Most waiting requests whose deadlines a step checks."""

_HORIZON_S = 60.0
"""How far beyond the deadline a forecast looks, so as to tell the client when to retry."""

_RETRY_AFTER_S = 1.0
"""Retry delay if there is no forecast."""

_TELLING = 0.5
"""Share of the time left above which the error of a forecast is recorded. A shorter forecast is
mostly the rest of the step in which the request arrived."""
_WINDOW, _ENOUGH = 100, 20
_MEMORY_S = 60.0
"""How many forecasts are remembered, and for how long."""
_QUANTILE = 0.99
_UNKNOWN_MARGIN, _MAX_MARGIN = 0.2, 0.5


class ForecastErrors:
    """Ratios of first tokens to their forecasts of late, less one: how much later they came."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque()  # (time, error), the oldest first
        self._ordered: list[float] = []

    def margin(self, now_s: float) -> float:
        """Return the share by which to lengthen forecasts: a high quantile of the errors."""
        self._forget(now_s)
        if len(self._ordered) < _ENOUGH:
            return _UNKNOWN_MARGIN
        return max(0.0, self._ordered[int(_QUANTILE * len(self._ordered))])

    def observe(self, request: Request, now_s: float) -> None:
        """Record the first token of a request."""
        if request.foreseen_s is None:
            return
        since_s, ttft_s = request.foreseen_s
        # A machine that slowed down meanwhile says little about the forecast's error.
        error = min(_MAX_MARGIN, (now_s - since_s) / ttft_s - 1.0)
        self._recent.append((now_s, error))
        insort(self._ordered, error)
        self._forget(now_s)

    def _forget(self, now_s: float) -> None:
        recent = self._recent
        while len(recent) > _WINDOW or (recent and recent[0][0] < now_s - _MEMORY_S):
            _, error = recent.popleft()
            del self._ordered[bisect_left(self._ordered, error)]


class Refusal(NamedTuple):
    """A request that ends before it has run, and the output for its client."""

    request: Request
    output: RequestOutput


class LoadShedding:
    """Checks a request against the length of the queue and, with `shed_load`, its TTFT SLO.

    An admitted request is owed its promise, so its forecast is lengthened by the margin, unless no
    other request is in the engine. A request without room displaces its own tenant's requests of
    less priority, or requests of tenants that have more waiting and at least as much service.
    Pushing out of the longest queue shares a buffer without keeping any of it free (Choudhury and
    Hahne, 1998).
    """

    def __init__(
        self, config: SchedulerConfig, queues: Queues, forecast: Forecast, errors: ForecastErrors
    ) -> None:
        self._config = config
        self._queues = queues
        self._forecast = forecast
        self._errors = errors

    def is_urgent(self, lateness: Lateness, now_s: float) -> bool:
        """Whether prompts must go in order of their deadlines for all to be in time."""
        if not self._queues.keeps_deadlines:
            return False
        due = self._queues.due(_MOST_DUE)
        return lateness.slack_s(due, self._errors.margin(now_s)) < 0.0

    def check_arrival(self, request: Request, now_s: float) -> list[Refusal]:
        """Return the refusals that a new request causes: its own, or those of waiting requests.

        A request that allows it becomes best-effort instead of being refused for its TTFT.
        """
        crowding = None
        if self._queues.num_waiting >= self._config.max_waiting:
            crowding = next(self._crowding(request), None)
            if crowding is None:
                error = f"{self._queues.num_waiting} requests are waiting already"
                return [self._for_queue(request, error, now_s)]
        refused = self._judge_ttft(request, now_s)
        if crowding is None or refused:
            return refused
        return [self._for_queue(crowding, _DISPLACED, now_s)]

    def _crowding(self, request: Request, *, promised: bool = False) -> Iterator[Request]:
        """Yield the waiting requests that the request may displace, the last in line first.

        Its own tenant's requests of less priority come first, then those of tenants with as much
        service and more waiting, best-effort ones among them.

        Args:
            promised: whether to yield only requests with a promise.
        """
        own = self._queues.tenant(request)
        own_line: Sequence[Request] = ()
        others: list[_Line] = []
        for tenant, line in self._queues.lines():
            if tenant is own:
                own_line = line
            elif _may_lose(tenant, own, promised=promised):
                others.append(_Line(tenant, line))
        priority = request.message.service.priority
        less = itertools.takewhile(
            lambda r: r.message.service.priority > priority, reversed(own_line)
        )
        yield from (last for last in less if not last.message.is_rerun)
        while others:
            most = max(others, key=lambda line: line.num_by_weight)
            if (len(own_line) + 1) / own.weight >= most.num_by_weight:
                return
            taken = most.take()
            if taken is None:
                others.remove(most)
            elif not taken.message.is_rerun:
                yield taken

    def _judge_ttft(self, request: Request, now_s: float) -> list[Refusal]:
        deadline_s = request.ttft_deadline_s
        if not self._config.shed_load or deadline_s is None:
            return []
        left_s = deadline_s - now_s
        stretch = 1.0 + self._errors.margin(now_s) if self._queues else 1.0
        ttft_s = self._forecast.ttft_s(request, now_s, left_s + _HORIZON_S)
        if ttft_s is None:
            return []
        excess_s, displaced = stretch * ttft_s - left_s, list[Request]()
        if excess_s > 0.0:
            displaced = self._displaced(request, excess_s)
            if displaced:
                ttft_s = self._forecast.ttft_s(request, now_s, left_s, displaced) or math.inf
            if not displaced or stretch * ttft_s > left_s:
                taken_s = deadline_s + excess_s - request.message.arrival_time_s
                error = (
                    f"the first token could take {taken_s:.1f} s, longer than the TTFT "
                    f"SLO of {request.slo.ttft_s:g} s allows"
                )
                return self._for_ttft([request], error, excess_s)
        if ttft_s > _TELLING * left_s:
            request.foreseen_s = now_s, ttft_s
        return self._for_ttft(displaced, _DISPLACED, excess_s)

    def _displaced(self, request: Request, excess_s: float) -> list[Request]:
        """Return requests whose prompts take at least `excess_s`; none if too few give way."""
        found: list[Request] = []
        crowding = self._crowding(request, promised=True)
        due = (one for one in crowding if one.ttft_deadline_s is not None)
        for one in itertools.islice(due, _MOST_DISPLACED):
            found.append(one)
            excess_s -= self._forecast.prompt_s(one)
            if excess_s <= 0.0:
                return found
        return []

    def _for_ttft(
        self, requests: Iterable[Request], error: str, retry_after_s: float
    ) -> list[Refusal]:
        refused: list[Refusal] = []
        for request in requests:
            if request.message.service.allow_best_effort:
                self._queues.waive(request)
            else:
                refused.append(_refusal(request, RefusalReason.TTFT_SLO, error, retry_after_s))
        return refused

    def _for_queue(self, request: Request, error: str, now_s: float) -> Refusal:
        retry_after_s = self._forecast.next_end_s(now_s)
        return _refusal(request, RefusalReason.QUEUE_FULL, error, retry_after_s)


def _may_lose(tenant: Tenant, own: Tenant, *, promised: bool) -> bool:
    """Whether a tenant's waiting requests may be displaced for another's."""
    if tenant.is_best_effort is not own.is_best_effort:
        return tenant.is_best_effort and not promised
    return tenant.counter_s >= own.counter_s


class _Line:
    """A tenant's waiting requests, taken from the end."""

    def __init__(self, tenant: Tenant, requests: Sequence[Request]) -> None:
        self._weight = tenant.weight
        self._requests = requests
        self._num_left = len(requests)

    @property
    def num_by_weight(self) -> float:
        return self._num_left / self._weight

    def take(self) -> Request | None:
        """Return the last request that was not taken yet."""
        if not self._num_left:
            return None
        self._num_left -= 1
        return self._requests[self._num_left]


def _refusal(
    request: Request, reason: RefusalReason, error: str, retry_after_s: float | None
) -> Refusal:
    output = RequestOutput(
        request_id=request.request_id,
        finish_reason=FinishReason.REFUSED,
        refusal=reason,
        error=error,
        retry_after_s=_RETRY_AFTER_S if retry_after_s is None else retry_after_s,
    )
    return Refusal(request, output)
