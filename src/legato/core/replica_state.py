"""An engine at one moment, as whoever chooses among several needs to know it."""

import msgspec

from legato.core.stats import TenantStats


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine has to do, and what it expects of a request more; small, to be told often.

    The forecasts are the engine's own, by its step-time model and its queue; they are 0 as long as
    it knows nothing of its steps.

    Attributes:
        num_running, num_waiting: requests.
        num_free_blocks: that no request uses, be they cached or empty.
        delay_s: how long the first token of the shortest prompt would take, if it came now from the
            tenant of which most requests wait.
        token_s: by how much it comes later for each token more that has to be computed for it.
        itl_s: how long a step takes of the streams' tokens alone, with one stream more.
        stream_s: by how much it takes longer for each stream beyond that.
        fetch_token_s: how long a token's keys and values take to come from another engine; 0 as
            long as none have.
        tenants: as in `SchedulerStats`.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int
    num_free_blocks: int
    block_size: int
    delay_s: float = 0.0
    token_s: float = 0.0
    itl_s: float = 0.0
    stream_s: float = 0.0
    fetch_token_s: float = 0.0
    tenants: tuple[TenantStats, ...] = ()

    def ttft_s(self, num_missing_tokens: int) -> float:
        """When the first token is expected of a prompt of which so many tokens are not cached."""
        return self.delay_s + self.token_s * num_missing_tokens
