"""The present state of an engine, for routers that choose among several."""

import msgspec

from legato.core.stats import TenantStats


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's load, and its forecasts for one more request; small, since it is sent often.

    The forecasts come from the engine's own step-time model and queue; they are 0 while its step
    times are unknown.

    Attributes:
        num_running, num_waiting: numbers of requests.
        num_free_blocks: blocks that no request uses, cached or empty.
        delay_s: time to the first token of the shortest prompt, if it came now from the tenant with
            most requests waiting.
        token_s: extra time for each further token that must be computed.
        itl_s: duration of a step of decodes with one stream more.
        stream_s: extra time for each stream beyond that.
        fetch_token_s: time to fetch a token's keys and values from another engine; 0 until some
            have come.
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
        """Return the expected TTFT of a prompt with `num_missing_tokens` that are not cached."""
        return self.delay_s + self.token_s * num_missing_tokens
