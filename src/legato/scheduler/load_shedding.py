"""Decides whether a new request may wait, and which requests are refused for it."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from legato.core.config import SchedulerConfig
from legato.core.outputs import FinishReason, RefusalReason, RequestOutput
from legato.core.request import Request
from legato.scheduler.forecast import Forecast
from legato.scheduler.queues import Queues
from legato.scheduler.recent_quantile import RecentQuantile
from legato.scheduler.tenants import Tenant

_DISPLACED = "requests have come that go before: of more priority, or of tenants with less waiting"
_MOST_DISPLACED = 8
"""Most waiting requests that one request may displace."""

_HORIZON_S = 60.0
"""How far beyond the deadline a forecast looks, so as to tell the client when to retry."""

_RETRY_AFTER_S = 1.0
"""Retry delay if there is no forecast."""

_TELLING = 0.5
"""Share of the time left above which the error of a forecast is recorded. A shorter forecast is
mostly the rest of the step in which the request arrived."""
_WINDOW, _ENOUGH = 100, 20
_QUANTILE = 0.99
_UNKNOWN_MARGIN, _MAX_MARGIN = 0.2, 0.5


class ForecastErrors:
    """Relative errors of recent TTFT forecasts: a quantile of how much later the tokens came."""

    def __init__(self) -> None:
        self._recent = RecentQuantile(_WINDOW, _QUANTILE)

    @property
    def margin(self) -> float:
        """Share by which to lengthen forecasts."""
        if len(self._recent) < _ENOUGH:
            return _UNKNOWN_MARGIN
        return max(0.0, self._recent.value)

    def observe(self, request: Request, now_s: float) -> None:
        """Record the first token of a request."""
        if request.foreseen_s is None:
            return
        since_s, ttft_s = request.foreseen_s
        # A machine that slowed down meanwhile says little about the forecast's error.
        self._recent.add(min(_MAX_MARGIN, (now_s - since_s) / ttft_s - 1.0))


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

    def check_arrival(self, request: Request, now_s: float) -> list[Refusal]:
        """Return the refusals that a new request causes: its own, or those of waiting requests.

        A request that allows it becomes best-effort instead of being refused for its TTFT.
        """
        crowding = None
        if self._queues.num_waiting >= self._config.max_waiting:
            crowding = next(self._crowding(request, promised=False), None)
            if crowding is None:
                error = f"{self._queues.num_waiting} requests are waiting already"
                return [self._for_queue(request, error, now_s)]
        refused = self._judge_ttft(request, now_s)
        if crowding is None or refused:
            return refused
        return [self._for_queue(crowding, _DISPLACED, now_s)]

    def _crowding(self, request: Request, *, promised: bool) -> Iterator[Request]:
        """Yield the waiting requests that the request may displace, the last in line first.

        Its own tenant's requests of less priority come first, then those of other tenants.

        Args:
            promised: whether to yield only requests with a promise; else requests without one come
                first.
        """
        own = self._queues.tenant(request)
        lines: defaultdict[Tenant, list[Request]] = defaultdict(list)
        for best_effort in (False,) if promised else (False, True):
            for tenant, line in self._queues.lines(best_effort=best_effort):
                if tenant.counter_s >= own.counter_s:
                    lines[tenant] += [one for one in line if not one.message.is_rerun]
        num_own = (len(lines[own]) + 1) / own.weight
        for last in reversed(lines.pop(own, [])):
            if last.message.service.priority > request.message.service.priority:
                yield last
        while lines:
            most = max(lines, key=lambda tenant: len(lines[tenant]) / tenant.weight)
            if num_own >= len(lines[most]) / most.weight:
                return
            yield lines[most].pop()

    def _judge_ttft(self, request: Request, now_s: float) -> list[Refusal]:
        deadline_s = request.ttft_deadline_s
        if not self._config.shed_load or deadline_s is None:
            return []
        left_s = deadline_s - now_s
        stretch = 1.0 + self._errors.margin if self._queues else 1.0
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
        for one in islice(due, _MOST_DISPLACED):
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
