"""Whether a new request may wait, is refused at once, or loses its promise."""

from legato.core.config import SchedulerConfig
from legato.core.outputs import FinishReason, RefusalReason, RequestOutput
from legato.core.request import Request
from legato.scheduler.forecast import Forecast
from legato.scheduler.queues import Queues

_HORIZON_S = 60.0
"""How far beyond a deadline a forecast looks for the time at which to come again."""

_RETRY_AFTER_S = 1.0
"""Where there is nothing to tell it from."""


class LoadShedding:
    """Checks a request against the length of the queue and, with `shed_load`, its TTFT SLO."""

    def __init__(self, config: SchedulerConfig, queues: Queues, forecast: Forecast) -> None:
        self._config = config
        self._queues = queues
        self._forecast = forecast

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
        # In doubt for the request: whoever is refused would be late by more than the model errs.
        if ttft_s is None or ttft_s <= left_s * (1.0 + self._forecast.margin):
            return None
        if request.message.service.allow_best_effort:
            request.give_up_promise()
            return None
        error = (
            f"the first token would come in {ttft_s:.1f} s, later than the TTFT SLO of "
            f"{request.slo.ttft_s:g} s allows"
        )
        return _refused(request, RefusalReason.TTFT_SLO, error, ttft_s - left_s)


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
