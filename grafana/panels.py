"""What the Grafana dashboard shows: rows of graphs, and their queries in PromQL."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One graph.

    Attributes:
        unit: Grafana's name of it: s, percentunit, short, reqps.
        queries: key the legend, value an expression in PromQL.
        stacked: whether the curves are parts of a whole.
    """

    title: str
    text: str
    unit: str
    queries: dict[str, str]
    stacked: bool = False


def rate(metric: str, *, by: str = "", **labels: str) -> str:
    """How fast a counter of the chosen models grows, a second; `by` keeps those labels."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({select(metric, **labels)}[$__rate_interval]))"


def quantile(q: float, histogram: str, *, by: str = "") -> str:
    """A quantile over the chosen models."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', by=labels)})"


def mean(histogram: str) -> str:
    return f"{rate(f'{histogram}_sum')} / {rate(f'{histogram}_count')}"


def select(metric: str, **labels: str) -> str:
    """A metric of the chosen models."""
    wanted = ['model_name=~"$model"', *(f'{name}="{value}"' for name, value in labels.items())]
    return f"{metric}{{{', '.join(wanted)}}}"


def _latency(title: str, text: str, histogram: str, slo: str) -> Panel:
    """Percentiles by class, beside what is promised."""
    quantiles = {
        f"p{100 * q:g} {{{{slo_class}}}}": quantile(q, histogram, by="slo_class")
        for q in (0.5, 0.9, 0.99)
    }
    promise = {"promised {{slo_class}}": select("legato:slo_seconds", slo=slo)}
    return Panel(title, text, "s", {**quantiles, **promise})


_ATTAINMENT = " / ".join(
    (
        rate("legato:slo_checks_total", by="slo_class, slo", verdict="in_time"),
        rate("legato:slo_checks_total", by="slo_class, slo"),
    )
)

_PER_POSITION = (
    f"{rate('legato:spec_decode_num_accepted_tokens_per_pos_total', by='position')} / ignoring "
    f"(position) group_left {rate('legato:spec_decode_num_drafts_total')}"
)

NOT_SHOWN = {
    "legato:slo_quantile",  # a setting
    "legato:iteration_tokens_total",  # prefill and decode tokens are
    "legato:e2e_request_latency_seconds",
    "legato:request_inference_time_seconds",
    "legato:request_time_per_output_token_seconds",
    "legato:cache_config_info",
    # The sizes of requests, which hardly change
    "legato:request_prompt_tokens",
    "legato:request_prefill_kv_computed_tokens",
    "legato:request_generation_tokens",
    "legato:request_max_num_generation_tokens",
    "legato:request_params_max_tokens",
    "legato:request_params_n",
    "legato:request_choices",  # requests are
    "legato:replica_start_time_seconds",
    "process_start_time_seconds",
    "process_virtual_memory_bytes",
}
"""Metrics that no panel needs; all others are on one."""

ROWS: dict[str, tuple[Panel, ...]] = {
    "Promises": (
        Panel(
            "SLO attainment",
            "Share of gaps (itl), first tokens (ttft) and paces (tpot) in time.",
            "percentunit",
            {"{{slo_class}} {{slo}}": _ATTAINMENT},
        ),
        _latency(
            "Inter-token latency",
            "The gaps that users feel. A promise is a bound of a bucket.",
            "legato:inter_token_latency_seconds",
            "itl",
        ),
        Panel(
            "Gaps delivered",
            "The promised quantile of the last minute's gaps, as tokens were handed to clients.",
            "s",
            {
                "delivered {{slo_class}}": select("legato:slo_delivered_seconds"),
                "promised {{slo_class}}": select("legato:slo_seconds", slo="itl"),
            },
        ),
        _latency(
            "Time to first token",
            "From arrival to the first token.",
            "legato:time_to_first_token_seconds",
            "ttft",
        ),
        Panel(
            "Goodput",
            "Requests a second of classes with a promise, by what became of it.",
            "reqps",
            {
                "{{slo_class}} {{verdict}}": rate(
                    "legato:slo_requests_total", by="slo_class, verdict"
                )
            },
            stacked=True,
        ),
        Panel(
            "Refused",
            "Completions a second that were refused, by reason.",
            "reqps",
            {"{{reason}}": rate("legato:request_refused_total", by="reason")},
            stacked=True,
        ),
        Panel(
            "Promises that cannot be kept",
            "1 where the decodes alone take longer than an SLO allows.",
            "short",
            {
                "unattainable": select("legato:slo_unattainable"),
                "steps over budget a second": rate("legato:num_steps_over_budget_total"),
            },
        ),
    ),
    "Steps": (
        Panel(
            "Tokens of a step",
            "Mean: the next of each running stream with its drafts, and the prompts' chunks.",
            "short",
            {
                "decode": mean("legato:iteration_decode_tokens"),
                "prefill": mean("legato:iteration_prefill_tokens"),
            },
            stacked=True,
        ),
        Panel(
            "Duration of a step",
            "How long the executor took.",
            "s",
            {f"p{100 * q:g}": quantile(q, "legato:step_time_seconds") for q in (0.5, 0.9, 0.99)},
        ),
        Panel(
            "Measured over predicted",
            "Of the step-time model; 1 is as predicted. The budget leaves the margin.",
            "short",
            {
                **{
                    f"p{100 * q:g}": quantile(q, "legato:step_time_ratio") for q in (0.5, 0.9, 0.99)
                },
                "1 + margin": f"1 + {select('legato:step_time_margin')}",
            },
        ),
        Panel(
            "Chunk",
            "Prompt tokens of the latest step that had any.",
            "short",
            {"tokens": select("legato:prefill_chunk_tokens")},
        ),
        Panel(
            "What ends a chunk",
            "Prefill chunks a second, by why they were no longer.",
            "short",
            {"{{ended_by}}": rate("legato:prefill_chunks_total", by="ended_by")},
            stacked=True,
        ),
        Panel(
            "Rows dropped",
            "Prompt tokens a second that steps dropped to keep a stream's deadline, and that later "
            "steps compute again.",
            "short",
            {"dropped": rate("legato:dropped_prefill_tokens_total")},
        ),
        Panel(
            "Tokens a second",
            "Prompt tokens count at the first token; cached ones did not have to be computed.",
            "short",
            {
                "prompts": rate("legato:prompt_tokens_total"),
                "of these cached": rate("legato:prompt_tokens_cached_total"),
                "generated": rate("legato:generation_tokens_total"),
            },
        ),
    ),
    "Drafts": (
        Panel(
            "Tokens a step",
            "That a step brings a stream, on average; 1 without drafts.",
            "short",
            {
                "tokens": f"1 + {rate('legato:spec_decode_num_accepted_tokens_total')} / "
                f"{rate('legato:stream_steps_total')}"
            },
        ),
        Panel(
            "Drafts that were right",
            "Share, by who drafted.",
            "percentunit",
            {
                "{{drafter}}": " / ".join(
                    rate(f"legato:spec_decode_num_{tokens}_tokens_total", by="drafter")
                    for tokens in ("accepted", "draft")
                )
            },
        ),
        Panel(
            "Right by place",
            "Share of drafts whose tokens were right up to there, from 0.",
            "percentunit",
            {"{{position}}": _PER_POSITION},
        ),
        Panel(
            "Draft tokens",
            "A second, by who drafted.",
            "short",
            {"{{drafter}}": rate("legato:spec_decode_num_draft_tokens_total", by="drafter")},
            stacked=True,
        ),
        Panel(
            "What ends drafts",
            "Steps of streams a second, by why they held no more drafts.",
            "short",
            {"{{ended_by}}": rate("legato:drafts_ended_total", by="ended_by")},
            stacked=True,
        ),
    ),
    "Requests": (
        Panel(
            "Running and waiting",
            "Requests.",
            "short",
            {
                "running": select("legato:num_requests_running"),
                "waiting": select("legato:num_requests_waiting"),
            },
        ),
        Panel(
            "Where a request's time goes",
            "Means.",
            "s",
            {
                "queue": mean("legato:request_queue_time_seconds"),
                "prefill": mean("legato:request_prefill_time_seconds"),
                "decode": mean("legato:request_decode_time_seconds"),
            },
            stacked=True,
        ),
        Panel(
            "Ends",
            "Completions a second, by reason; HTTP errors by status; and answers with a warning.",
            "reqps",
            {
                "{{finished_reason}}": rate("legato:request_success_total", by="finished_reason"),
                "HTTP {{status}}": rate("legato:request_errors_total", by="status"),
                "with a warning": rate("legato:request_warnings_total"),
            },
        ),
    ),
    "Tenants": (
        Panel(
            "Service by tenant",
            "Seconds of step time a second, by whose requests they are.",
            "short",
            {"{{tenant}}": rate("legato:tenant_service_seconds_total", by="tenant")},
            stacked=True,
        ),
        Panel(
            "TTFT by tenant",
            "A flood of one tenant's must not make another's first tokens wait.",
            "s",
            {
                "p50 {{tenant}}": quantile(
                    0.5, "legato:tenant_time_to_first_token_seconds", by="tenant"
                ),
                "p99 {{tenant}}": quantile(
                    0.99, "legato:tenant_time_to_first_token_seconds", by="tenant"
                ),
            },
        ),
        Panel(
            "Requests by tenant",
            "Running, waiting, and refused a second.",
            "short",
            {
                "{{tenant}} running": select("legato:tenant_requests_running"),
                "{{tenant}} waiting": select("legato:tenant_requests_waiting"),
                "{{tenant}} refused": rate("legato:tenant_requests_refused_total", by="tenant"),
            },
        ),
    ),
    "Replicas": (
        Panel(
            "Requests by replica",
            "Of a fleet: running and waiting.",
            "short",
            {
                "{{replica}} running": select("legato:replica_requests_running"),
                "{{replica}} waiting": select("legato:replica_requests_waiting"),
            },
        ),
        Panel(
            "Forecast of first tokens by replica",
            "Of a short prompt that came now; more replicas are started where this comes near to "
            "what is promised.",
            "s",
            {"{{replica}}": select("legato:replica_forecast_ttft_seconds")},
        ),
        Panel(
            "KV cache by replica",
            "In use by requests.",
            "percentunit",
            {"{{replica}}": select("legato:replica_kv_cache_usage_perc")},
        ),
    ),
    "Cache and faults": (
        Panel(
            "KV cache",
            "In use by requests, and kept for later ones.",
            "percentunit",
            {
                "in use": select("legato:kv_cache_usage_perc"),
                "kept": select("legato:kv_cache_cached_perc"),
            },
            stacked=True,
        ),
        Panel(
            "KV cache of sliding windows",
            "In use by requests; empty for models whose layers all keep all tokens.",
            "percentunit",
            {"{{window}} tokens": select("legato:kv_window_usage_perc")},
        ),
        Panel(
            "Prefix cache hits",
            "Share of prompt tokens that did not have to be computed; short: in cached blocks, but "
            "without a state, or a window's blocks, to go on from.",
            "percentunit",
            {
                name: f"{rate(f'legato:prefix_cache_{name}_total')} / "
                f"{rate('legato:prefix_cache_queries_total')}"
                for name in ("hits", "short")
            },
        ),
        Panel(
            "Kept states of recurrent layers",
            "From which later requests may go on; none for models without such layers.",
            "short",
            {"states": select("legato:state_checkpoints")},
        ),
        Panel(
            "Preemptions and faults",
            "A second.",
            "short",
            {
                "preemptions": rate("legato:num_preemptions_total"),
                "failed steps": rate("legato:num_failed_steps_total"),
                "contained errors": rate("legato:num_contained_errors_total"),
                "engine restarts": rate("legato:num_engine_restarts_total"),
                "stuck processes": rate("legato:num_stuck_processes_total"),
            },
        ),
    ),
    "Transfers": (
        Panel(
            "Blocks from other engines",
            "Bytes a second, and what the link brings while it is busy.",
            "Bps",
            {
                "read": rate("legato:kv_transfer_bytes_total"),
                "while busy": f"{rate('legato:kv_transfer_bytes_total')} / "
                f"{rate('legato:kv_transfer_seconds_total')}",
            },
        ),
        Panel(
            "Prompts from other engines",
            "A second; those that did not come whole are computed.",
            "reqps",
            {
                "fetched": rate("legato:kv_transfer_prompts_fetched_total"),
                "computed after all": rate("legato:kv_transfer_prompts_recomputed_total"),
            },
        ),
        Panel(
            "Prompts kept for other engines",
            "Those kept now, and those that nobody fetched in time, a second.",
            "short",
            {
                "kept": select("legato:kv_transfer_leases"),
                "expired": rate("legato:kv_transfer_leases_expired_total"),
            },
        ),
    ),
    "Processes": (
        Panel(
            "Processor time",
            "Seconds a second: 1 is one core.",
            "short",
            {"{{process}}": rate("process_cpu_seconds_total", by="process")},
            stacked=True,
        ),
        Panel(
            "Memory",
            "Resident, with the KV cache.",
            "bytes",
            {"{{process}}": select("process_resident_memory_bytes")},
            stacked=True,
        ),
        Panel(
            "Open files",
            "A connection is one.",
            "short",
            {
                "{{process}}": select("process_open_fds"),
                "{{process}} at most": select("process_max_fds"),
            },
        ),
    ),
}
