"""Sends each request of a fleet to a replica, and tracks requests and caches."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from legato.core.errors import ConfigError
from legato.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, HitEnds, KVEvent
from legato.core.replica_state import ReplicaState
from legato_fleet.routing.policy import (
    KeptPromisePolicy,
    PowerOfTwo,
    PrefixAffinity,
    RoundRobin,
    RoutingPolicy,
)
from legato_fleet.routing.prefix_index import PrefixIndex
from legato_fleet.routing.replica_view import STATE_EVERY_S, ReplicaView
from legato_fleet.routing.request import Placement, Role, RoutedRequest

ROUTING_POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "kept-promise": KeptPromisePolicy,
    "prefix-affinity": PrefixAffinity,
    "power-of-two": PowerOfTwo,
    "round-robin": RoundRobin,
}
"""Key a policy's name in the configuration, value its class."""

_CONTINUING: tuple[Role, ...] = ("both", "decode", "prefill")
"""Roles that may send a request's tokens; the first role with replicas does."""

_MOST_TRIES = 3
"""Replicas to try, one after the other, if each rejects a request."""


class NoReplicaError(Exception):
    """No replica accepts the request."""


class Left(NamedTuple):
    """Requests that a lost replica was to continue, by id.

    Attributes:
        waiting: without a first token, so that they may run elsewhere.
        begun: clients have received some of their output.
    """

    waiting: list[str]
    begun: list[str]


class Router:
    """Routes requests. It is pure: time is an argument, and the caller passes the messages.

    The caller reports each request's first token and end, and the end of its prefill if another
    replica computes the prompt.

    A replica without a report for some periods is doubtful: it gets no requests while other
    replicas of its role are fresh. After more periods it counts as gone, until its next report.

    Args:
        policy: a key of `ROUTING_POLICIES`; each role has its own instance.
        weights: of tenants; the others have weight 1.
        state_every_s: seconds between two reports of a replica.
    """

    def __init__(
        self,
        policy: str,
        weights: Mapping[str, float] | None = None,
        *,
        state_every_s: float = STATE_EVERY_S,
    ) -> None:
        if policy not in ROUTING_POLICIES:
            raise ConfigError(
                f"no routing policy {policy!r}; policies are: {', '.join(ROUTING_POLICIES)}"
            )
        make = ROUTING_POLICIES[policy]
        roles: tuple[Role, ...] = ("both", "prefill", "decode")
        self._policies = {role: make() for role in roles}
        self._weights = weights or {}
        self._state_every_s = state_every_s
        self._replicas: dict[str, ReplicaView] = {}
        self._index = PrefixIndex()
        self._routed: dict[str, tuple[RoutedRequest, Placement]] = {}  # key request id

    @property
    def asks_prefixes(self) -> bool:
        """Whether requests need `block_hashes` and the router needs cache events."""
        return self._policies["both"].asks_prefixes

    @property
    def replicas(self) -> Mapping[str, ReplicaView]:
        """All replicas; key replica id."""
        return self._replicas

    def join(
        self, replica_id: str, role: Role = "both", *, transfer_token_s: float | None = None
    ) -> None:
        """Add a replica. Args: as `ReplicaView`'s."""
        assert replica_id not in self._replicas, "replica ids are unique"
        self._replicas[replica_id] = ReplicaView(
            replica_id,
            role,
            weights=self._weights,
            transfer_token_s=transfer_token_s,
            state_every_s=self._state_every_s,
        )

    def drain(self, replica_id: str) -> None:
        """Stop sending requests to a replica that is about to go."""
        self._replicas[replica_id].is_accepting = False

    def leave(self, replica_id: str, now_s: float) -> Left:
        """Remove a replica with its cache; forget and return the requests that it was to continue.

        Prompts that it computed for other replicas are not lost: those replicas compute them.
        """
        view = self._replicas.pop(replica_id)
        self._index.clear(replica_id)
        left = Left([], [])
        for has_begun, request_ids in ((False, left.waiting), (True, left.begun)):
            for request_id in view.request_ids(has_begun=has_begun):
                if self._routed[request_id][1].decode == replica_id:
                    request_ids.append(request_id)
                    self._forget(request_id, now_s)
        return left

    def note_state(self, replica_id: str, state: ReplicaState, now_s: float) -> None:
        """Take a replica's report."""
        self._replicas[replica_id].note_state(state, now_s)

    def note_kv_events(self, replica_id: str, events: Iterable[KVEvent]) -> None:
        """Take a replica's cache events."""
        for event in events:
            match event:
                case BlockStored():
                    self._index.store(replica_id, event.block_hashes)
                case BlockRemoved():
                    self._index.remove(replica_id, event.block_hashes)
                case HitEnds():
                    self._index.change_ends(replica_id, event.added, event.removed)
                case AllBlocksCleared():
                    self._index.clear(replica_id)

    def route(
        self, request: RoutedRequest, now_s: float, *, without: Collection[str] = ()
    ) -> Placement:
        """Place a request, and count it at its replicas until it ends.

        With both pools, a prefill replica computes the prompt and a decode replica continues it,
        unless there is nothing to hand over. Without one of the pools, the other does both.

        Args:
            without: ids of replicas that have rejected it.

        Raises:
            NoReplicaError: no replica accepts it.
        """
        num_cached = self._num_cached(request)
        role, replicas = self._continuing(without, now_s)
        view = self._send(request, role, replicas, num_cached, now_s)
        prefill: str | None = None
        if role == "decode" and request.num_handed_tokens > num_cached.get(view.replica_id, 0):
            prefills = self._accepting("prefill", without, now_s)
            if prefills:
                sent = self._send(request, "prefill", prefills, num_cached, now_s)
                prefill = sent.replica_id
        placement = Placement(prefill=prefill, decode=view.replica_id)
        self._routed[request.request_id] = request, placement
        return placement

    def is_accepting(self, now_s: float) -> bool:
        """Whether any replica accepts requests."""
        return any(self._accepting(role, (), now_s) for role in _CONTINUING)

    def may_try_again(self, refused_by: Collection[str], role: Role, now_s: float) -> bool:
        """Whether a request that replicas of a role rejected may go to another of that role."""
        return len(refused_by) < _MOST_TRIES and bool(self._accepting(role, refused_by, now_s))

    def stranded(self, now_s: float) -> list[str]:
        """Return ids of requests that wait at lost replicas of a role that still has others."""
        return [
            request_id
            for view in self._replicas.values()
            if view.is_gone(now_s) and self._accepting(view.role, (), now_s)
            for request_id in view.request_ids(has_begun=False)
            if self._routed[request_id][1].decode == view.replica_id
        ]

    def note_prefilled(self, request_id: str, now_s: float) -> None:
        """Record that the prefill replica has computed a request's prompt."""
        self._end_at(self._routed[request_id][1].prefill, request_id, now_s)

    def note_first_token(self, request_id: str, now_s: float) -> None:
        """Record a request's first token from its decode replica."""
        self._replicas[self._routed[request_id][1].decode].begin(request_id, now_s)

    def note_end(self, request_id: str, num_output_tokens: int, now_s: float) -> None:
        """Record a request's end, for any reason."""
        self._forget(request_id, now_s)
        if num_output_tokens:
            for policy in self._policies.values():
                policy.note_end(num_output_tokens)

    def _continuing(self, without: Collection[str], now_s: float) -> tuple[Role, list[ReplicaView]]:
        """Return the role and the replicas that may send the next request's tokens."""
        for role in _CONTINUING:
            if accepting := self._accepting(role, without, now_s):
                return role, accepting
        raise NoReplicaError("no replica accepts requests")

    def _accepting(self, role: Role, without: Collection[str], now_s: float) -> list[ReplicaView]:
        """Return the replicas of a role that accept a request; doubtful ones only if all are."""
        there = [
            view
            for view in self._replicas.values()
            if view.is_accepting and view.role == role and not view.is_gone(now_s)
        ]
        fresh = [view for view in there if not view.is_doubtful(now_s)]
        return [view for view in fresh or there if view.replica_id not in without]

    def _num_cached(self, request: RoutedRequest) -> dict[str, int]:
        """Return cached tokens; key replica id."""
        found = self._index.num_cached_blocks(request.block_hashes)
        return {one: num_blocks * request.block_size for one, num_blocks in found.items()}

    def _send(
        self,
        request: RoutedRequest,
        role: Role,
        replicas: list[ReplicaView],
        num_cached: Mapping[str, int],
        now_s: float,
    ) -> ReplicaView:
        view = self._policies[role].choose(request, replicas, num_cached, now_s)
        view.send(request, num_cached.get(view.replica_id, 0), now_s)
        # The next request with the same prompt shares the blocks computed for this one.
        self._index.expect(view.replica_id, request.block_hashes)
        return view

    def _forget(self, request_id: str, now_s: float) -> None:
        request, placement = self._routed.pop(request_id)
        for replica_id in (placement.prefill, placement.decode):
            self._end_at(replica_id, request_id, now_s)
            if replica_id is not None:
                self._index.expect_no_longer(replica_id, request.block_hashes)

    def _end_at(self, replica_id: str | None, request_id: str, now_s: float) -> None:
        view = self._replicas.get(replica_id or "")
        if view is not None and view.has(request_id):
            view.end(request_id, now_s)
