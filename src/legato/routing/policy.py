"""What every router asks of a policy, and the policies that know nothing of promises."""

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

from legato.routing.replica_view import ReplicaView
from legato.routing.request import RoutedRequest

_AFFINE = 0.5
"""Share of a prompt that must be cached for it to follow."""


class RoutingPolicy(Protocol):
    """Picks one of the replicas that a request may go to.

    Attributes:
        asks_prefixes: whether it wants to know what replicas have cached.
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
        """One of `replicas`, of which there is at least one.

        Args:
            num_cached: tokens of the prompt that a replica has; key its id, missing where none.
        """
        ...

    def note_end(self, num_output_tokens: int) -> None:
        """A request has ended with so many tokens."""
        ...


class RoundRobin:
    """Each in turn."""

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
    """Of two at random, the one with fewer requests in flight (Mitzenmacher, 2001)."""

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
    """Where most of the prompt is cached, if that is much of it; else where fewest are in flight.

    As SGLang's router has it: what all prompts begin with draws none of them anywhere.
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
