"""Whether a new request may wait, is refused at once, or loses its promise."""

from legato.core.config import SchedulerConfig
from legato.core.outputs import FinishReason, RefusalReason, RequestOutput
from legato.core.request import Request
from legato.scheduler.forecast import Forecast
from legato.scheduler.queues import Queues
from legato.scheduler.recent_quantile import RecentQuantile

_HORIZON_S = 60.0
"""How far beyond a deadline a forecast looks for the time at which to come again."""

_RETRY_AFTER_S = 1.0
"""Where there is nothing to tell it from."""

_TELLING = 0.5
"""Share of the time left that a forecast must come to: of shorter ones the part of a step in which
a request arrives is most."""
_WINDOW, _ENOUGH = 100, 20
_QUANTILE = 0.95
_UNKNOWN_MARGIN, _MAX_MARGIN = 0.2, 0.5


class ForecastErrors:
    """How much later than forecast first tokens came, relatively: a quantile of the last ones."""

    def __init__(self) -> None:
        self._recent = RecentQuantile(_WINDOW, _QUANTILE)

    @property
    def margin(self) -> float:
        """What forecasts are to be taken longer by."""
        if len(self._recent) < _ENOUGH:
            return _UNKNOWN_MARGIN
        return max(0.0, self._recent.value)

    def observe(self, request: Request, now_s: float) -> None:
        """The first token of a request has come."""
        if request.foreseen_s is None:
            return
        since_s, ttft_s = request.foreseen_s
        # A machine that has become slower meanwhile says little of how forecasts err.
        self._recent.add(min(_MAX_MARGIN, (now_s - since_s) / ttft_s - 1.0))


class LoadShedding:
    """Checks a request against the length of the queue and, with `shed_load`, its TTFT SLO.

    Who is admitted is owed the promise, so a forecast counts with its margin; but where nothing
    else is there, a request may try.
    """

    def __init__(
        self, config: SchedulerConfig, queues: Queues, forecast: Forecast, errors: ForecastErrors
    ) -> None:
        self._config = config
        self._queues = queues
        self._forecast = forecast
        self._errors = errors

    def check(self, request: Request, now_s: float) -> RequestOutput | None:
        """The refusal, or None for a request that may wait; it may have become best-effort."""
        if self._is_full and self._crowding(request) is None:
            error = f"{self._queues.num_waiting} requests are waiting already"
            retry_after_s = self._forecast.next_end_s(now_s)
            return _refused(request, RefusalReason.QUEUE_FULL, error, retry_after_s)
        return self._check_ttft(request, now_s)

    def make_room(self, request: Request, now_s: float) -> tuple[Request, RequestOutput] | None:
        """The waiting request that is refused for another tenant's, and the refusal, if one is.

        Args:
            request: that has passed the check.
        """
        crowding = self._crowding(request) if self._is_full else None
        if crowding is None:
            return None
        error = "other tenants' requests have come, of which fewer wait"
        retry_after_s = self._forecast.next_end_s(now_s)
        return crowding, _refused(crowding, RefusalReason.QUEUE_FULL, error, retry_after_s)

    @property
    def _is_full(self) -> bool:
        return self._queues.num_waiting >= self._config.max_waiting

    def _crowding(self, request: Request) -> Request | None:
        """The last of the tenant with most waiting, if that is more than the request's would have.

        Pushing out of the longest queue shares a buffer without keeping any of it free (Choudhury
        and Hahne, 1998).
        """
        own, most = self._queues.tenant(request), self._queues.most_waiting()
        if most is None or (own.num_waiting + 1) / own.weight >= most.num_waiting / most.weight:
            return None
        last = self._queues.last_waiting(most)
        return None if last is None or last.message.is_rerun else last

    def _check_ttft(self, request: Request, now_s: float) -> RequestOutput | None:
        if not self._config.shed_load or request.ttft_deadline_s is None:
            return None
        left_s = request.ttft_deadline_s - now_s
        ttft_s = self._forecast.ttft_s(request, now_s, left_s + _HORIZON_S)
        if ttft_s is None:
            return None
        latest_s = ttft_s * (1.0 + self._errors.margin) if self._queues else ttft_s
        if latest_s <= left_s:
            if ttft_s > _TELLING * left_s:
                request.foreseen_s = now_s, ttft_s
            return None
        if request.message.service.allow_best_effort:
            request.give_up_promise()
            return None
        error = (
            f"the first token could take {latest_s:.1f} s, longer than the TTFT SLO of "
            f"{request.slo.ttft_s:g} s allows"
        )
        return _refused(request, RefusalReason.TTFT_SLO, error, latest_s - left_s)


def _refused(
    request: Request, refusal: RefusalReason, error: str, retry_after_s: float | None
) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        finish_reason=FinishReason.REFUSED,
        refusal=refusal,
        error=error,
        retry_after_s=_RETRY_AFTER_S if retry_after_s is None else retry_after_s,
    )
