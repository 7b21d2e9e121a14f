"""The interface of routing policies, and the policies that ignore promises."""

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

from legato.routing.replica_view import ReplicaView
from legato.routing.request import RoutedRequest

_AFFINE = 0.5
"""A request follows its cached prefix if more than this share of its prompt is cached."""


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
