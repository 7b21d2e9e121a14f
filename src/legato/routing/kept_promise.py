"""Legato's own policy: a request goes where its promise is most likely kept."""

import math
from collections.abc import Mapping, Sequence

from legato.routing.replica_view import ReplicaView
from legato.routing.request import RoutedRequest

_ERROR = 0.3
"""Standard deviation of the logarithm of what first tokens take over what was forecast."""

_FIRST_MEAN_OUTPUT, _LEARNING_RATE = 256.0, 0.01


class KeptPromise:
    """Forecasts each request at each replica, by what the replica tells of its queue and steps.

    A request goes where its TTFT SLO is most likely kept. Of replicas where it is as likely, it
    goes where it would end first, its prompt counted twice, since others wait for that too. So a
    cached prefix counts for the time that it saves, and a session stays where it is as long as
    waiting there takes less than computing it elsewhere.

    Gaps between tokens need no choice of their own: a replica lets nobody in beside whom it could
    not keep them, which delays first tokens, and which it tells of.
    """

    asks_prefixes = True

    def __init__(self) -> None:
        self._mean_output = _FIRST_MEAN_OUTPUT

    def choose(
        self,
        request: RoutedRequest,
        replicas: Sequence[ReplicaView],
        num_cached: Mapping[str, int],
        now_s: float,
    ) -> ReplicaView:
        def cost(replica: ReplicaView) -> tuple[float, float]:
            cached = num_cached.get(replica.replica_id, 0)
            num_missing = max(1, request.num_prompt_tokens - cached)
            ttft_s = self.ttft_s(request, replica, cached, now_s)
            rest_s = 0.0 if replica.role == "prefill" else self._mean_output * replica.itl_s(1)
            seconds = ttft_s + rest_s + num_missing * replica.token_s
            return -_chance(ttft_s, request.slo.ttft_s), seconds

        return min(replicas, key=cost)

    def note_end(self, num_output_tokens: int) -> None:
        self._mean_output += _LEARNING_RATE * (num_output_tokens - self._mean_output)

    def ttft_s(
        self, request: RoutedRequest, replica: ReplicaView, num_cached: int, now_s: float
    ) -> float:
        """When its first token comes, if it goes there."""
        num_missing = max(1, request.num_prompt_tokens - num_cached)
        ttft_s = replica.ttft_s(request.tenant, num_missing, now_s)
        num_lacking = replica.num_lacking_tokens(request, num_cached)
        if num_lacking <= 0 or not replica.num_in_flight:
            return ttft_s
        # Streams end one after the other, evenly over what an output takes.
        num_ends = num_lacking / request.num_prompt_tokens
        return ttft_s + num_ends * self._mean_output * replica.itl_s(0) / replica.num_in_flight


def _chance(ttft_s: float, slo_s: float | None) -> float:
    """That a first token forecast for `ttft_s` is in time, in hundredths: errors are log-normal."""
    if slo_s is None or ttft_s <= 0.0:
        return 1.0
    return round(0.5 * math.erfc(math.log(ttft_s / slo_s) / (_ERROR * math.sqrt(2.0))), 2)
