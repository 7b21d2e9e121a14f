"""The engine in numbers: what metrics, `/health`, the dashboard and callers read."""

import msgspec


class CacheInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache, as it was made. Attributes: `dtype`: what keys and values are held in."""

    num_blocks: int
    block_size: int
    dtype: str
    enable_prefix_caching: bool


OTHER_TENANTS = "other"
"""Stands for all tenants beyond the first few."""


class TenantStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant has, and has had from the start.

    Attributes:
        service_s: predicted time of steps, as far as it was its requests'.
    """

    name: str
    num_running: int
    num_waiting: int
    num_refused: int
    service_s: float


class KeptPromise(msgspec.Struct, frozen=True, kw_only=True):
    """A promise on the gaps between tokens, and what is made of it.

    Attributes:
        itl_s: what is promised, in seconds.
        quantile: share of a request's gaps that it is promised for.
        delivered_s: what this share of all gaps of the last minute was within, as they were handed
            to clients; None where there was none.
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
        num_steps_over_budget: steps that held more than their budget, for their decodes alone.
        step_time_margin: relative error that the step-time model allows for.
        broken_promise: why the latest step could not keep an SLO whatever it held; empty if it
            could.
        num_prefix_cache_queries: prompt tokens of requests that had their first token.
        num_prefix_cache_hits: of these, those that did not have to be computed.
        tenants: the first few that came, and `OTHER_TENANTS`.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0
    num_steps_over_budget: int = 0
    step_time_margin: float = 0.0
    broken_promise: str = ""
    num_prefix_cache_queries: int = 0
    num_prefix_cache_hits: int = 0
    tenants: tuple[TenantStats, ...] = ()


class TransferStats(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks from and to other engines; counts are from the start.

    Attributes:
        num_bytes: that were read from other engines.
        read_s: how long anything was being read.
        num_fetched: prompts that another engine was asked for, and had all blocks of.
        num_recomputed: those of which some did not come, and are computed here.
        num_leases: prompts that are kept for other engines now.
        num_expired: those that nobody asked for in time, or not to the end.
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
        num_failed_steps: that raised at their first attempt, from the start.
        num_contained_errors: errors of bookkeeping from the start. Each ended one request, or left
            one question without an answer.
        kv_usage: fraction of the cache's blocks in use, in [0, 1].
        num_cached_blocks: that are kept for later requests, of those not in use.
        transfer: None where there are no other engines to send to or fetch from.
    """

    num_failed_steps: int = 0
    num_contained_errors: int = 0
    kv_usage: float = 0.0
    num_cached_blocks: int = 0
    transfer: TransferStats | None = None
