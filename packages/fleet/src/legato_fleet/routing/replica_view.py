"""A router's view of a replica: the requests sent there, and the replica's own reports."""

from collections import Counter
from collections.abc import Mapping

import msgspec

from legato.core.replica_state import ReplicaState
from legato_fleet.routing.request import Role, RoutedRequest

_TOKEN_S = 1e-3
"""Assumed seconds for a prompt token until a replica reports; among equal replicas, any number
shows which has less to do."""

_LEAST_S = 1e-9

STATE_EVERY_S = 1.0
"""Seconds between two reports of a replica."""
_DOUBTFUL_AFTER, _GONE_AFTER = 3.0, 15.0
"""Periods without a report until a replica is doubtful, and gone; a step may last two periods.
Requests that wait at a replica that is gone run elsewhere."""


class _Sent(msgspec.Struct):
    """A request that was sent to the replica.

    Attributes:
        num_missing_tokens: uncached tokens of its prompt; 0 after its first token.
    """

    request: RoutedRequest
    num_missing_tokens: int


class ReplicaView:
    """One replica, as one router sees it. Time is an argument.

    Between two reports, the router adds the requests that it sends there itself. Load that only the
    replica knows, such as other routers' requests and streams that leave no room, is the part of
    its forecast that exceeds the router's own.

    Args:
        weights: of tenants; the others have weight 1.
        transfer_token_s: for a replica that gets keys and values from another replica: assumed
            seconds for a token's, until it reports them; None if it computes them.
        state_every_s: seconds between two of its reports.

    Attributes:
        is_accepting: whether it takes new requests.
        state: its last report; None before the first.
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
        self._num_tokens = 0  # of the prompts of all requests there
        # Key tenant, value uncached prompt tokens of requests that wait for their first token.
        self._missing_of: Counter[str] = Counter()
        self._num_missing = 0  # the sum over all tenants
        self._num_computed = 0.0  # of these, tokens computed by the time below
        self._at_s = 0.0
        self._told_s = self._others_s = 0.0
        self._num_told = self._num_tokens_told = 0

    @property
    def num_in_flight(self) -> int:
        """Requests that this router sent there and that have not ended."""
        return len(self._sent)

    @property
    def token_s(self) -> float:
        """Seconds by which each uncached token of a prompt delays the first token."""
        if self._transfer_token_s is not None:
            told_s = 0.0 if self.state is None else self.state.fetch_token_s
            return max(told_s or self._transfer_token_s, _LEAST_S)
        told_s = 0.0 if self.state is None else self.state.token_s
        return told_s or _TOKEN_S

    def is_doubtful(self, now_s: float) -> bool:
        """Whether its last report is so old that it may hang."""
        return self._is_silent(_DOUBTFUL_AFTER, now_s)

    def is_gone(self, now_s: float) -> bool:
        """Whether its last report is so old that it counts as gone until the next one."""
        return self._is_silent(_GONE_AFTER, now_s)

    def has(self, request_id: str) -> bool:
        return request_id in self._sent

    def request_ids(self, *, has_begun: bool) -> list[str]:
        """Return the ids of requests there that have, or do not have, their first token."""
        sent = self._sent.items()
        return [one for one, it in sent if (it.num_missing_tokens == 0) is has_begun]

    def note_state(self, state: ReplicaState, now_s: float) -> None:
        """Take a report of the replica."""
        self._advance(now_s)
        self.state = state
        self._told_s = now_s
        self._num_told, self._num_tokens_told = len(self._sent), self._num_tokens
        own_s = self.token_s * (self._num_missing - self._num_computed)
        self._others_s = max(0.0, state.delay_s - own_s)

    def send(self, request: RoutedRequest, num_cached: int, now_s: float) -> None:
        """Add a request with `num_cached` cached tokens of its prompt."""
        self._advance(now_s)
        num_missing = max(1, request.num_prompt_tokens - num_cached)
        self._sent[request.request_id] = _Sent(request, num_missing)
        self._num_tokens += request.num_prompt_tokens
        self._missing_of[request.tenant] += num_missing
        self._num_missing += num_missing

    def begin(self, request_id: str, now_s: float) -> None:
        """Record a request's first token."""
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
        """Record a request's end, for any reason."""
        self.begin(request_id, now_s)
        self._num_tokens -= self._sent.pop(request_id).request.num_prompt_tokens

    def ttft_s(self, tenant: str, num_missing: int, now_s: float) -> float:
        """Forecast the TTFT of a tenant's request with `num_missing` tokens to compute."""
        others_s = max(self._others_s - (now_s - self._told_s), self.itl_s(0))
        return others_s + self.token_s * (self._num_ahead(tenant, num_missing, now_s) + num_missing)

    def itl_s(self, num_more: int) -> float:
        """Forecast the duration of a step with `num_more` more streams."""
        if self.state is None:
            return 0.0
        num_since = len(self._sent) - self._num_told
        return max(0.0, self.state.itl_s + (num_since + num_more - 1) * self.state.stream_s)

    def num_lacking_tokens(self, request: RoutedRequest, num_cached: int) -> int:
        """Return how many tokens its cache must free before the prompt fits."""
        if self.state is None:
            return 0
        num_free = self.state.num_free_blocks * self.state.block_size
        num_since = self._num_tokens - self._num_tokens_told
        return request.num_prompt_tokens - num_cached + num_since - num_free

    def _is_silent(self, num_periods: float, now_s: float) -> bool:
        """Whether it was silent for so many periods; False before its first report."""
        return self.state is not None and now_s - self._told_s > num_periods * self._state_every_s

    def _num_ahead(self, tenant: str, num_missing: int, now_s: float) -> float:
        """Return the tokens of other prompts that are computed before a tenant's next one.

        Engines serve tenants in turn, by their weights: until all work of one tenant is done, no
        other tenant gets more by weight.
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
