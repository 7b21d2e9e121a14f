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
        if self._queues.num_waiting >= self._config.max_waiting:
            error = f"{self._queues.num_waiting} requests are waiting already"
            retry_after_s = self._forecast.next_end_s(now_s)
            return _refused(request, RefusalReason.QUEUE_FULL, error, retry_after_s)
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
