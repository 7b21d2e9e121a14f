"""What a router knows of a replica: what it sent there, and what the replica told of itself."""

from collections import Counter
from collections.abc import Mapping

import msgspec

from legato.core.replica_state import ReplicaState
from legato.routing.request import Role, RoutedRequest

_TOKEN_S = 1e-3
"""What a token of a prompt is taken to cost as long as a replica tells nothing; of replicas that
are alike, any number tells which has less to do."""

_LEAST_S = 1e-9

STATE_EVERY_S = 1.0
"""Seconds between two reports of a replica."""
_DOUBTFUL_AFTER, _GONE_AFTER = 3.0, 15.0
"""Periods without a state: a step may last two of them. After the second, requests that wait there
are run elsewhere."""


class _Sent(msgspec.Struct):
    """A request that was sent there.

    Attributes:
        num_missing_tokens: of its prompt, that were not cached; 0 once its first token has come.
    """

    request: RoutedRequest
    num_missing_tokens: int


class ReplicaView:
    """One replica, as one router sees it. Time is an argument.

    Between two of its snapshots, the router goes on from what it sends there itself. What the
    replica knows beyond that, as other routers' requests and streams that leave no room, is what
    its forecast is longer by.

    Args:
        weights: of tenants; all others weigh 1.
        transfer_token_s: what a token's keys and values take to come there as long as it tells
            nothing of that, where it has them from another replica instead of computing them; else
            None.
        state_every_s: seconds between two of its reports.

    Attributes:
        is_accepting: False where it is not to be sent anything new.
        state: what it last told of itself; None before it did.
    """

    def __init__(
        self,
        replica_id: str,
        role: Role = "both",
        *,
        weights: Mapping[str, float] | None = None,
        transfer_token_s: float | None = None,
        state_every_s: float = STATE_EVERY_S,
    ) -> None:
        self.replica_id = replica_id
        self.role: Role = role
        self.is_accepting = True
        self.state: ReplicaState | None = None
        self._weights = weights or {}
        self._state_every_s = state_every_s
        self._transfer_token_s = transfer_token_s
        self._sent: dict[str, _Sent] = {}  # key request id
        self._num_tokens = 0  # of prompts, of all that are there
        # Key tenant, value tokens of prompts whose requests wait for their first token.
        self._missing_of: Counter[str] = Counter()
        self._num_missing = 0  # the same of all tenants
        self._num_computed = 0.0  # of these, those that are computed by now, at the time below
        self._at_s = 0.0
        self._told_s = self._others_s = 0.0
        self._num_told = self._num_tokens_told = 0

    @property
    def num_in_flight(self) -> int:
        """Requests that this router sent there and that have not ended."""
        return len(self._sent)

    @property
    def token_s(self) -> float:
        """By how much a first token comes later for each token that its prompt lacks there."""
        if self._transfer_token_s is not None:
            told_s = 0.0 if self.state is None else self.state.fetch_token_s
            return max(told_s or self._transfer_token_s, _LEAST_S)
        told_s = 0.0 if self.state is None else self.state.token_s
        return told_s or _TOKEN_S

    def is_doubtful(self, now_s: float) -> bool:
        """Whether its state is so old that it may hang."""
        return self._is_silent(_DOUBTFUL_AFTER, now_s)

    def is_gone(self, now_s: float) -> bool:
        """Whether its state is so old that nothing is expected of it until it tells another."""
        return self._is_silent(_GONE_AFTER, now_s)

    def has(self, request_id: str) -> bool:
        return request_id in self._sent

    def request_ids(self, *, has_begun: bool) -> list[str]:
        """Of the requests there, those whose first token has come, or those that wait for it."""
        sent = self._sent.items()
        return [one for one, it in sent if (it.num_missing_tokens == 0) is has_begun]

    def note_state(self, state: ReplicaState, now_s: float) -> None:
        """Take what the replica tells of itself."""
        self._advance(now_s)
        self.state = state
        self._told_s = now_s
        self._num_told, self._num_tokens_told = len(self._sent), self._num_tokens
        own_s = self.token_s * (self._num_missing - self._num_computed)
        self._others_s = max(0.0, state.delay_s - own_s)

    def send(self, request: RoutedRequest, num_cached: int, now_s: float) -> None:
        """A request goes there, of whose prompt so many tokens are cached."""
        self._advance(now_s)
        num_missing = max(1, request.num_prompt_tokens - num_cached)
        self._sent[request.request_id] = _Sent(request, num_missing)
        self._num_tokens += request.num_prompt_tokens
        self._missing_of[request.tenant] += num_missing
        self._num_missing += num_missing

    def begin(self, request_id: str, now_s: float) -> None:
        """A request's first token has come."""
        self._advance(now_s)
        sent = self._sent[request_id]
        if not sent.num_missing_tokens:
            return
        tenant, num_missing = sent.request.tenant, sent.num_missing_tokens
        sent.num_missing_tokens = 0
        self._missing_of[tenant] -= num_missing
        if not self._missing_of[tenant]:
            del self._missing_of[tenant]
        self._num_missing -= num_missing
        self._num_computed = max(0.0, self._num_computed - num_missing)

    def end(self, request_id: str, now_s: float) -> None:
        """A request has ended, however."""
        self.begin(request_id, now_s)
        self._num_tokens -= self._sent.pop(request_id).request.num_prompt_tokens

    def ttft_s(self, tenant: str, num_missing: int, now_s: float) -> float:
        """When a tenant's request would get its first token that has so many tokens to compute."""
        others_s = max(self._others_s - (now_s - self._told_s), self.itl_s(0))
        return others_s + self.token_s * (self._num_ahead(tenant, num_missing, now_s) + num_missing)

    def itl_s(self, num_more: int) -> float:
        """How long a step takes of the tokens of its streams and of `num_more`."""
        if self.state is None:
            return 0.0
        num_since = len(self._sent) - self._num_told
        return max(0.0, self.state.itl_s + (num_since + num_more - 1) * self.state.stream_s)

    def num_lacking_tokens(self, request: RoutedRequest, num_cached: int) -> int:
        """How many tokens more would have to fit into its cache for a prompt to find room."""
        if self.state is None:
            return 0
        num_free = self.state.num_free_blocks * self.state.block_size
        num_since = self._num_tokens - self._num_tokens_told
        return request.num_prompt_tokens - num_cached + num_since - num_free

    def _is_silent(self, num_periods: float, now_s: float) -> bool:
        """Whether it has told nothing for so long; not of a replica that has yet to begin."""
        return self.state is not None and now_s - self._told_s > num_periods * self._state_every_s

    def _num_ahead(self, tenant: str, num_missing: int, now_s: float) -> float:
        """Tokens of others' prompts that are computed before a tenant's next one is.

        Engines serve tenants in turn, by their weights: until all that one has there is done, none
        of the others gets more by weight.
        """
        if not self._num_missing:
            return 0.0
        left = 1.0 - self._computed_at(now_s) / self._num_missing
        if len(self._missing_of) == 1 and tenant in self._missing_of:
            return left * self._num_missing
        weights, own = self._weights, left * self._missing_of[tenant]
        share = (own + num_missing) / weights.get(tenant, 1.0)
        return own + sum(
            min(left * missing, share * weights.get(name, 1.0))
            for name, missing in self._missing_of.items()
            if name != tenant
        )

    def _computed_at(self, now_s: float) -> float:
        computed = self._num_computed + (now_s - self._at_s) / self.token_s
        return min(computed, float(self._num_missing))

    def _advance(self, now_s: float) -> None:
        self._num_computed = self._computed_at(now_s)
        self._at_s = now_s
