"""The engine in numbers, for metrics, `/health`, the dashboard and callers."""

import msgspec


class CacheInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache as allocated.

    Attributes:
        num_blocks: blocks of the layers that keep all tokens of a request.
        dtype: data type of keys and values.
        windows: of the layers that keep only the last tokens; each window has blocks of its own.
    """

    num_blocks: int
    block_size: int
    dtype: str
    enable_prefix_caching: bool
    windows: tuple[int, ...] = ()


OTHER_TENANTS = "other"
"""Name for all tenants beyond the first few."""


class TenantStats(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's present requests, and its totals from the start.

    Attributes:
        service_s: its requests' share of the predicted time of steps.
    """

    name: str
    num_running: int
    num_waiting: int
    num_refused: int
    service_s: float


class KeptPromise(msgspec.Struct, frozen=True, kw_only=True):
    """A promise on the gaps between tokens, and how it is kept.

    Attributes:
        itl_s: the promised gap, in seconds.
        quantile: share of a request's gaps that the promise is for.
        delivered_s: this quantile of all gaps of the last minute, as they were handed to clients;
            None if there was no gap.
    """

    itl_s: float
    quantile: float
    delivered_s: float | None


class ReplicaStats(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of a fleet in numbers.

    Attributes:
        started_s: when it began to serve, in Unix time.
        delay_s: as in `ReplicaState`.
        num_running, num_waiting, kv_usage: as in `EngineStats`.
    """

    started_s: float
    delay_s: float
    num_running: int
    num_waiting: int
    kv_usage: float


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the scheduler. Counts of preemptions, steps and tokens are from the start.

    Attributes:
        num_steps_over_budget: steps whose decodes alone exceeded the budget.
        step_time_margin: relative error that the step-time model allows for. If the executor drops
            rows to keep deadlines, interruptions are not in it.
        broken_promise: why the latest step could not keep an SLO even without prefill; empty if it
            could.
        num_prefix_cache_queries: prompt tokens of requests that had their first token; a prompt
            counts once, for any number of choices.
        num_prefix_cache_hits: the part of these tokens that did not have to be computed.
        num_prefix_cache_short: tokens in cached blocks that admitted requests computed again,
            because no recurrent state, or block of a window, was kept at their end.
        tenants: the first few tenants that came, and `OTHER_TENANTS`.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0
    num_steps_over_budget: int = 0
    step_time_margin: float = 0.0
    broken_promise: str = ""
    num_prefix_cache_queries: int = 0
    num_prefix_cache_hits: int = 0
    num_prefix_cache_short: int = 0
    tenants: tuple[TenantStats, ...] = ()


class TransferStats(msgspec.Struct, frozen=True, kw_only=True):
    """Transfers of blocks from and to other engines; counts are from the start.

    Attributes:
        num_bytes: bytes read from other engines.
        read_s: seconds in which a read was under way.
        num_fetched: prompts whose blocks all came from another engine.
        num_recomputed: prompts that lacked some blocks, which are computed here.
        num_leases: prompts kept for other engines now.
        num_expired: kept prompts that no engine fetched in time, or not to the end.
    """

    num_bytes: int = 0
    read_s: float = 0.0
    num_fetched: int = 0
    num_recomputed: int = 0
    num_leases: int = 0
    num_expired: int = 0


class EngineStats(SchedulerStats, frozen=True, kw_only=True):
    """The scheduler's numbers after a step, and those of the engine around it.

    Attributes:
        num_failed_steps: steps that raised at their first attempt, from the start.
        num_contained_errors: errors of bookkeeping from the start. Each ended one request, or
            one attempt, as of a report or a change of settings, or had a step planned again.
        kv_usage: fraction of the cache's blocks in use, in [0, 1].
        num_cached_blocks: unused blocks that are kept for later requests.
        num_state_checkpoints: recurrent states that are kept for later requests.
        window_usage: key a window in tokens, value the fraction of its blocks in use, in [0, 1].
        transfer: None if there are no other engines to send to or fetch from.
    """

    num_failed_steps: int = 0
    num_contained_errors: int = 0
    kv_usage: float = 0.0
    num_cached_blocks: int = 0
    num_state_checkpoints: int = 0
    window_usage: dict[int, float] = msgspec.field(default_factory=dict)
    transfer: TransferStats | None = None
