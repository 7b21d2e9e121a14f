"""The interface of routing policies, and the policies."""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Protocol

from legato_fleet.routing.replica_view import ReplicaView
from legato_fleet.routing.request import RoutedRequest

_AFFINE = 0.5
"""A request follows its cached prefix if more than this share of its prompt is cached."""

_ERROR = 0.3
"""Standard deviation of the logarithm of a first token's time over its forecast."""

_BESIDE_PROMISE = 0.1
"""Weight of a second that breaks no promise. Without a promise, only seconds count."""

_MOST_BUSY = 0.95

_FIRST_MEAN_OUTPUT, _LEARNING_RATE = 256.0, 0.01

_MEMORY_S = 30.0
"""Work of so many seconds ago counts for 1/e."""
_LEAST_S = 1.0
"""Rates assume at least so many seconds of observation."""


class RoutingPolicy(Protocol):
    """Picks a replica for a request.

    Attributes:
        asks_prefixes: whether it needs to know what replicas have cached.
    """

    @property
    def asks_prefixes(self) -> bool: ...

    def choose(
        self,
        request: RoutedRequest,
        replicas: Sequence[ReplicaView],
        num_cached: Mapping[str, int],
        now_s: float,
    ) -> ReplicaView:
        """Return one of `replicas`, which has at least one.

        Args:
            num_cached: cached tokens of the prompt; key replica id, absent if there are none.
        """
        ...

    def note_end(self, num_output_tokens: int) -> None:
        """Record that a request has ended with so many tokens."""
        ...


class RoundRobin:
    """Picks each replica in turn."""

    asks_prefixes = False

    def __init__(self) -> None:
        self._num_sent = 0

    def choose(
        self,
        request: RoutedRequest,  # noqa: ARG002
        replicas: Sequence[ReplicaView],
        num_cached: Mapping[str, int],  # noqa: ARG002
        now_s: float,  # noqa: ARG002
    ) -> ReplicaView:
        self._num_sent += 1
        return replicas[(self._num_sent - 1) % len(replicas)]

    def note_end(self, num_output_tokens: int) -> None:
        pass


class PowerOfTwo:
    """Picks the one of two random replicas with fewer requests in flight (Mitzenmacher, 2001)."""

    asks_prefixes = False

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(
        self,
        request: RoutedRequest,  # noqa: ARG002
        replicas: Sequence[ReplicaView],
        num_cached: Mapping[str, int],  # noqa: ARG002
        now_s: float,  # noqa: ARG002
    ) -> ReplicaView:
        two = self._random.sample(replicas, min(2, len(replicas)))
        return min(two, key=lambda replica: replica.num_in_flight)

    def note_end(self, num_output_tokens: int) -> None:
        pass


class PrefixAffinity:
    """Picks the replica with most of the prompt cached, if that is much; else the least busy one.

    The least busy one has the fewest requests in flight. As in SGLang's router, a short
    beginning that all prompts share attracts no request.
    """

    asks_prefixes = True

    def choose(
        self,
        request: RoutedRequest,
        replicas: Sequence[ReplicaView],
        num_cached: Mapping[str, int],
        now_s: float,  # noqa: ARG002
    ) -> ReplicaView:
        def place(replica: ReplicaView) -> tuple[int, int]:
            cached = num_cached.get(replica.replica_id, 0)
            is_much = cached > _AFFINE * request.num_prompt_tokens
            return -cached * is_much, replica.num_in_flight

        return min(replicas, key=place)

    def note_end(self, num_output_tokens: int) -> None:
        pass


class KeptPromisePolicy:
    """Legato's own policy: a request goes where the fewest promises are broken for it.

    It forecasts each request at each replica from the replica's reports of its queue and steps.
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


class RecentWork:
    """Decaying sums of the requests of all replicas of a role, and of their compute time.

    Time is an argument and never decreases.
    """

    def __init__(self) -> None:
        self._num_requests = self._work_s = 0.0
        self._start_s: float | None = None
        self._at_s = 0.0

    def add(self, work_s: float, now_s: float) -> None:
        """Add a request, with the compute time of its prompt at its replica."""
        self._advance(now_s)
        self._num_requests += 1.0
        self._work_s += work_s

    def requests_per_s(self, now_s: float) -> float:
        self._advance(now_s)
        return self._num_requests / self._seconds

    def busy(self, now_s: float) -> float:
        """Return how many replicas this work would have kept fully busy."""
        self._advance(now_s)
        return self._work_s / self._seconds

    @property
    def _seconds(self) -> float:
        """Seconds of observation, weighted like the work: old seconds count less."""
        assert self._start_s is not None
        watched_s = max(_LEAST_S, self._at_s - self._start_s)
        return _MEMORY_S * -math.expm1(-watched_s / _MEMORY_S)

    def _advance(self, now_s: float) -> None:
        if self._start_s is None:
            self._start_s = self._at_s = now_s
        left = math.exp((self._at_s - now_s) / _MEMORY_S)
        self._num_requests *= left
        self._work_s *= left
        self._at_s = now_s
