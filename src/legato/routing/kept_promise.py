"""Legato's own policy: send a request where the fewest promises are broken for it."""

import math
from collections.abc import Mapping, Sequence

from legato.routing.recent_work import RecentWork
from legato.routing.replica_view import ReplicaView
from legato.routing.request import RoutedRequest

_ERROR = 0.3
"""Standard deviation of the logarithm of a first token's time over its forecast."""

_BESIDE_PROMISE = 0.1
"""Weight of a second that breaks no promise. Without a promise, only seconds count."""

_MOST_BUSY = 0.95

_FIRST_MEAN_OUTPUT, _LEARNING_RATE = 256.0, 0.01


class KeptPromisePolicy:
    """Forecasts each request at each replica from the replica's reports of its queue and steps.

    A request goes where it costs least, for itself and for others. For itself: its TTFT SLO times
    the chance of breaking it, and a fraction of the time until the request ends. For others: the
    time to compute its uncached tokens, counted for each request that comes before the queue has
    absorbed it. At a replica with little to do, that cost is small, and a session moves there
    instead of waiting. The busier all replicas are, the more it counts to compute nothing twice,
    and the session stays.

    Gaps between tokens need no term of their own: a replica admits no request beside which it could
    not keep them. That delays first tokens, and the replica reports the delay.
    """

    asks_prefixes = True

    def __init__(self) -> None:
        self._mean_output = _FIRST_MEAN_OUTPUT
        self._recent = RecentWork()

    def choose(
        self,
        request: RoutedRequest,
        replicas: Sequence[ReplicaView],
        num_cached: Mapping[str, int],
        now_s: float,
    ) -> ReplicaView:
        # Requests delayed per second of queueing, at one replica.
        num_replicas = len(replicas)
        busy = min(_MOST_BUSY, self._recent.busy(now_s) / num_replicas)
        delayed_per_s = self._recent.requests_per_s(now_s) / num_replicas / (1.0 - busy)

        def cost(replica: ReplicaView) -> float:
            cached = num_cached.get(replica.replica_id, 0)
            ttft_s = self.ttft_s(request, replica, cached, now_s)
            num_delayed = 1.0 + delayed_per_s * ttft_s
            return self._own_cost(request, replica, ttft_s) + num_delayed * _work_s(
                request, replica, cached
            )

        chosen = min(replicas, key=cost)
        num_there = num_cached.get(chosen.replica_id, 0)
        self._recent.add(_work_s(request, chosen, num_there), now_s)
        return chosen

    def note_end(self, num_output_tokens: int) -> None:
        self._mean_output += _LEARNING_RATE * (num_output_tokens - self._mean_output)

    def ttft_s(
        self, request: RoutedRequest, replica: ReplicaView, num_cached: int, now_s: float
    ) -> float:
        """Forecast the time to its first token at this replica."""
        num_missing = max(1, request.num_prompt_tokens - num_cached)
        ttft_s = replica.ttft_s(request.tenant, num_missing, now_s)
        num_lacking = replica.num_lacking_tokens(request, num_cached)
        if num_lacking <= 0 or not replica.num_in_flight:
            return ttft_s
        # Streams end one after the other, evenly over the time of an output.
        num_ends = num_lacking / request.num_prompt_tokens
        return ttft_s + num_ends * self._mean_output * replica.itl_s(0) / replica.num_in_flight

    def _own_cost(self, request: RoutedRequest, replica: ReplicaView, ttft_s: float) -> float:
        rest_s = 0.0 if replica.role == "prefill" else self._mean_output * replica.itl_s(1)
        slo_s = request.slo.ttft_s
        if slo_s is None:
            return ttft_s + rest_s
        return (1.0 - _chance(ttft_s, slo_s)) * slo_s + _BESIDE_PROMISE * (ttft_s + rest_s)


def _work_s(request: RoutedRequest, replica: ReplicaView, num_cached: int) -> float:
    return max(1, request.num_prompt_tokens - num_cached) * replica.token_s


def _chance(ttft_s: float, slo_s: float) -> float:
    """Return the chance that a first token forecast for `ttft_s` is in time.

    Errors are log-normal.
    """
    if ttft_s <= 0.0:
        return 1.0
    return 0.5 * math.erfc(math.log(ttft_s / slo_s) / (_ERROR * math.sqrt(2.0)))
