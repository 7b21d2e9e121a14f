"""Metrics of the engine: its steps, and its own counters as of the latest step.

Every step is observed, however rare scrapes are.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import get_args

from legato.core.stats import CacheInfo, EngineStats, TransferStats
from legato.core.step_record import ChunkRecord, DrafterName, DraftsEndedBy, EndedBy, StepRecord
from legato.observe.metrics.registry import MetricRegistry

# fmt: off
_STEP_S = (
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.125, 0.15, 0.2,
    0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_STEP_TIME_RATIO = (
    0.5, 0.7, 0.8, 0.85, 0.9, 0.94, 0.97, 1.0, 1.03, 1.06, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0, 4.0)
_STEP_TOKENS = (
    0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0,
    16384.0)
# fmt: on

_NUM_POSITIONS = 16
"""Positions in a draft that are counted separately."""


class StepMetrics:
    """Histograms of steps, the size of prompt chunks, and drafts."""

    def __init__(self, registry: MetricRegistry) -> None:
        steps = registry.section("Steps")
        self._tokens = steps.histogram(
            "iteration_tokens_total", "Tokens of a step.", _STEP_TOKENS
        ).of()
        self._prefill_tokens = steps.histogram(
            "iteration_prefill_tokens", "Prompt tokens of a step.", _STEP_TOKENS, own=True
        ).of()
        self._decode_tokens = steps.histogram(
            "iteration_decode_tokens",
            "Running streams' tokens of a step, drafts among them.",
            _STEP_TOKENS,
            own=True,
        ).of()
        self._chunk = steps.gauge(
            "prefill_chunk_tokens", "Prompt tokens of the latest step that had any.", own=True
        ).of()
        chunks = steps.counter(
            "prefill_chunks",
            "Chunks of prompts, by why they were no longer.",
            "ended_by",
            own=True,
        )
        self._chunks = {reason: chunks.of(reason) for reason in get_args(EndedBy)}
        self._dropped = steps.counter(
            "dropped_prefill_tokens",
            "Prompt tokens that a step dropped, to end before a stream's token was late. They are "
            "computed again.",
            own=True,
        ).of()
        self._seconds = steps.histogram(
            "step_time_seconds", "How long the executor took for a step.", _STEP_S, own=True
        ).of()
        self._ratio = steps.histogram(
            "step_time_ratio",
            "Measured over predicted time of a step.",
            _STEP_TIME_RATIO,
            own=True,
        ).of()
        self._drafts = DraftMetrics(registry)

    def observe(self, step: StepRecord) -> None:
        """Record a step that has run."""
        num_prefill, num_decode = step.num_prefill_tokens, step.num_decode_tokens
        self._tokens.observe(num_prefill + num_decode)
        self._prefill_tokens.observe(num_prefill)
        self._decode_tokens.observe(num_decode)
        self._seconds.observe(step.seconds)
        if step.predicted_s and step.went_as_planned:
            self._ratio.observe(step.seconds / step.predicted_s)
        if num_prefill:
            self._chunk.set(num_prefill)
        self._dropped.inc(step.num_dropped_tokens)
        for chunk in step.chunks:
            if chunk.ended_by is not None:
                self._chunks[chunk.ended_by].inc()
        self._drafts.observe(step)


def declare_engine_metrics(
    registry: MetricRegistry,
    stats: Callable[[], EngineStats],
    num_restarts: Callable[[], int],
    num_stuck: Callable[[], Mapping[str, int]],
    cache: CacheInfo,
) -> None:
    """Declare metrics that are read from the engine's counters at each scrape.

    Args:
        stats: returns the latest counters; a new engine's start from 0.
        num_restarts: returns how many engine processes have died.
        num_stuck: returns how many processes were killed because they did not answer;
            key the kind of process.
    """
    promises = registry.section("Promises")
    promises.read_gauge(
        "slo_unattainable",
        "1: the decodes alone take longer than an SLO allows; `/health` says why.",
        lambda: bool(stats().broken_promise),
        own=True,
    )
    promises.read_counter(
        "num_steps_over_budget",
        "Steps whose decodes alone exceeded the step budget.",
        lambda: stats().num_steps_over_budget,
        own=True,
    )

    steps = registry.section("Steps")
    steps.read_gauge(
        "step_time_margin",
        "Relative error that the step-time model allows for; high if other programs use "
        "the machine.",
        lambda: stats().step_time_margin,
        own=True,
    )
    steps.read_counter(
        "num_failed_steps",
        "Steps that raised or ran out of memory; the log says why.",
        lambda: stats().num_failed_steps,
        own=True,
    )
    steps.read_counter(
        "num_contained_errors",
        "Errors of bookkeeping, which ended a request or left work undone; the log has tracebacks.",
        lambda: stats().num_contained_errors,
        own=True,
    )

    requests = registry.section("Requests")
    requests.read_gauge(
        "num_requests_running",
        "Requests that have blocks. Each choice of `n` counts.",
        lambda: stats().num_running,
        for_routers=True,
    )
    requests.read_gauge(
        "num_requests_waiting",
        "Requests that do not run yet, counted likewise.",
        lambda: stats().num_waiting,
        for_routers=True,
    )

    engine = registry.section("Cache and engine")
    engine.read_gauge(
        "kv_cache_usage_perc",
        "Fraction of the KV cache in use, without blocks kept for their prefix.",
        lambda: stats().kv_usage,
        for_routers=True,
    )
    engine.read_gauge(
        "kv_cache_cached_perc",
        "Fraction of the KV cache kept for later requests.",
        lambda: stats().num_cached_blocks / cache.num_blocks,
        own=True,
    )
    engine.read_gauges(
        "kv_window_usage_perc",
        "Fraction in use of the blocks of sliding windows; by window, in tokens.",
        "window",
        read=lambda: {(str(window),): usage for window, usage in stats().window_usage.items()},
        own=True,
    )
    engine.read_counter(
        "prefix_cache_queries",
        "Prompt tokens looked up in the cache, counted once for any `n`.",
        lambda: stats().num_prefix_cache_queries,
    )
    engine.read_counter(
        "prefix_cache_hits",
        "The part of these tokens that did not have to be computed.",
        lambda: stats().num_prefix_cache_hits,
    )
    engine.read_counter(
        "prefix_cache_short",
        "Tokens in cached blocks that were computed again for lack of a recurrent state "
        "or a window's block.",
        lambda: stats().num_prefix_cache_short,
        own=True,
    )
    engine.read_gauge(
        "state_checkpoints",
        "States of recurrent layers kept for later requests.",
        lambda: stats().num_state_checkpoints,
        own=True,
    )
    engine.read_counter(
        "num_preemptions",
        "Requests that lost their blocks: the cache is too small, or they gave way to others.",
        lambda: stats().num_preemptions,
    )
    engine.read_counter(
        "num_engine_restarts", "Deaths of the engine process.", num_restarts, own=True
    )
    engine.read_counters(
        "num_stuck_processes",
        "Processes that were killed because they did not answer.",
        "process",
        read=lambda: {(process,): count for process, count in num_stuck().items()},
        own=True,
    )
    _declare_transfers(registry, lambda: stats().transfer or TransferStats())
    config = (
        str(cache.block_size),
        str(cache.num_blocks),
        cache.dtype,
        str(cache.enable_prefix_caching),
    )
    engine.read_gauges(
        "cache_config_info",
        "Always 1; the labels have the size of the KV cache, as vLLM's.",
        "block_size",
        "num_gpu_blocks",
        "cache_dtype",
        "enable_prefix_caching",
        read=lambda: {config: 1.0},
        for_routers=True,
    )


def _declare_transfers(registry: MetricRegistry, stats: Callable[[], TransferStats]) -> None:
    transfers = registry.section("Transfers")
    transfers.read_counter(
        "kv_transfer_bytes",
        "Bytes of the KV cache read from other engines.",
        lambda: stats().num_bytes,
        own=True,
    )
    transfers.read_counter(
        "kv_transfer_seconds",
        "Time in which bytes were being read.",
        lambda: stats().read_s,
        own=True,
    )
    transfers.read_counter(
        "kv_transfer_prompts_fetched",
        "Prompts whose blocks all came from another engine, but for what was cached.",
        lambda: stats().num_fetched,
        own=True,
    )
    transfers.read_counter(
        "kv_transfer_prompts_recomputed",
        "Prompts with blocks that were computed here instead; the log says why.",
        lambda: stats().num_recomputed,
        own=True,
    )
    transfers.read_gauge(
        "kv_transfer_leases",
        "Prompts kept for other engines.",
        lambda: stats().num_leases,
        own=True,
    )
    transfers.read_counter(
        "kv_transfer_leases_expired",
        "Prompts that were kept, and that no engine fetched in time.",
        lambda: stats().num_expired,
        own=True,
    )


class DraftMetrics:
    """Counts the drafts that were verified, the right ones, and why there were no more.

    As in vLLM, a draft is all draft tokens of one stream in one step.
    """

    def __init__(self, registry: MetricRegistry) -> None:
        section = registry.section("Drafts")
        drafters = get_args(DrafterName)
        drafts = section.counter(
            "spec_decode_num_drafts",
            "Streams of a step with drafts, each time.",
            "drafter",
        )
        draft_tokens = section.counter(
            "spec_decode_num_draft_tokens", "Draft tokens that were verified.", "drafter"
        )
        accepted = section.counter(
            "spec_decode_num_accepted_tokens", "Draft tokens that were right.", "drafter"
        )
        per_position = section.counter(
            "spec_decode_num_accepted_tokens_per_pos",
            f"Right drafts by their place in the draft, from 0; the first {_NUM_POSITIONS} places.",
            "position",
        )
        ended = section.counter(
            "drafts_ended",
            "Steps of streams, by why they held no more drafts.",
            "ended_by",
            own=True,
        )
        self._stream_steps = section.counter(
            "stream_steps",
            "Streams of all steps: a step brings a stream 1 + accepted tokens / these.",
            own=True,
        ).of()
        # Created at once, so that all appear from 0 on.
        self._drafts = {name: drafts.of(name) for name in drafters}
        self._draft_tokens = {name: draft_tokens.of(name) for name in drafters}
        self._accepted = {name: accepted.of(name) for name in drafters}
        self._per_position = [per_position.of(str(place)) for place in range(_NUM_POSITIONS)]
        self._ended = {reason: ended.of(reason) for reason in get_args(DraftsEndedBy)}

    def observe(self, step: StepRecord) -> None:
        """Count the drafts of a step that has run."""
        if step.drafts_ended_by is not None:
            self._ended[step.drafts_ended_by].inc()
        streams = [chunk for chunk in step.chunks if chunk.kind != "prefill"]
        self._stream_steps.inc(len(streams))
        drafted = [chunk for chunk in streams if chunk.num_drafts]
        for name in {chunk.drafter for chunk in drafted if chunk.drafter is not None}:
            self._count(name, [chunk for chunk in drafted if chunk.drafter == name])
        lengths = Counter(chunk.num_accepted for chunk in drafted)
        num_right = len(drafted)
        for place, counter in enumerate(self._per_position):
            num_right -= lengths[place]
            if not num_right:
                break
            counter.inc(num_right)

    def _count(self, name: DrafterName, drafted: list[ChunkRecord]) -> None:
        self._drafts[name].inc(len(drafted))
        self._draft_tokens[name].inc(sum(chunk.num_drafts for chunk in drafted))
        self._accepted[name].inc(sum(chunk.num_accepted for chunk in drafted))
