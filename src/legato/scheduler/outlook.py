"""Forecasts for a request not yet sent, for routers that choose among engines."""

from legato.core.request import AddRequest, Request
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams, SloClass
from legato.core.token_ids import token_array
from legato.scheduler.forecast import Forecast
from legato.scheduler.queues import Queues
from legato.scheduler.tenants import NEWCOMER

_LONG = 4096
"""Tokens of the prompt that measures the time per token; at most half of the context."""
_HORIZON_S = 60.0


class Outlook:
    """Forecasts for a hypothetical request of the tenant with most requests waiting.

    Args:
        slo: the promise to the request.
        max_model_len: in tokens.
    """

    def __init__(
        self, forecast: Forecast, queues: Queues, slo: SloClass, max_model_len: int
    ) -> None:
        self._forecast = forecast
        self._queues = queues
        self._long = min(_LONG, max_model_len // 2)
        self._slo = slo
        self._max_model_len = max_model_len

    def ttft_s(self, now_s: float) -> tuple[float, float]:
        """Return the seconds that an empty prompt waits, and those that each token adds."""
        shortest, long = self._request(1, now_s), self._request(self._long, now_s)
        found = self._forecast.two_ttfts_s(shortest, long, now_s, _HORIZON_S)
        if found is None:
            return 0.0, 0.0
        shortest_s, long_s = found
        if self._long == 1:
            return shortest_s, 0.0
        return shortest_s, max(0.0, long_s - shortest_s) / (self._long - 1)

    def itl_s(self, now_s: float) -> tuple[float, float]:
        """Return the seconds of a decode step with one stream more, and of each stream beyond."""
        return self._forecast.stream_step_s(now_s, self._long) or (0.0, 0.0)

    def _request(self, num_tokens: int, now_s: float) -> Request:
        tenant = self._queues.most_waiting()
        message = AddRequest(
            request_id="",
            prompt_token_ids=token_array((0,)) * num_tokens,
            params=SamplingParams(max_tokens=1),
            service=ServiceParams(tenant=NEWCOMER if tenant is None else tenant.name),
            arrival_time_s=now_s,
        )
        return Request(message, self._slo, self._max_model_len)
