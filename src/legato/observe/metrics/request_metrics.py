"""Metrics of requests. Names and meanings are vLLM's where it has the same."""

from collections.abc import Mapping

from legato.core.outputs import FinishReason, RefusalReason
from legato.core.slo import SloClass
from legato.observe.metrics import buckets
from legato.observe.metrics.registry import MetricRegistry

INVALID = "invalid"
REFUSALS = (INVALID, *RefusalReason)
"""Why a request is refused: it can never be served as asked, or for what the scheduler says."""


class RequestMetrics:
    """All of them; a completion counts as a request.

    Args:
        classes: of service, whose promises are bounds of buckets; key the name.
    """

    def __init__(self, registry: MetricRegistry, classes: Mapping[str, SloClass]) -> None:
        counter, histogram = registry.counter, registry.histogram
        promised = classes.values()
        ttft_s = buckets.with_bounds(buckets.TTFT_S, (slo.ttft_s for slo in promised))
        itl_s = buckets.with_bounds(buckets.PER_TOKEN_S, (slo.itl_s for slo in promised))
        tpot_s = buckets.with_bounds(buckets.PER_TOKEN_S, (slo.tpot_s for slo in promised))

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens prefilled.").of()
        self.cached_tokens = counter(
            "prompt_tokens_cached", "Of these, tokens that did not have to be computed."
        ).of()
        self.generation_tokens = counter("generation_tokens", "Tokens generated.").of()
        ended = counter("request_success", "Completions that ended, by reason.", "finished_reason")
        self.ended = {reason: ended.of(reason) for reason in FinishReason}
        refused = counter("request_refused", "Completions that were refused.", "reason")
        self.refused = {reason: refused.of(reason) for reason in REFUSALS}
        self.errors = counter(
            "request_errors", "HTTP requests answered with an error, by status.", "status"
        )

        # By class, in seconds
        self.ttft_s = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", ttft_s, "slo_class"
        )
        self.itl_s = histogram(
            "inter_token_latency_seconds", "From one token to the next.", itl_s, "slo_class"
        )
        self.tpot_s = histogram(
            "request_time_per_output_token_seconds",
            "Mean inter-token latency of a request.",
            tpot_s,
            "slo_class",
        )
        self.e2e_s = histogram(
            "e2e_request_latency_seconds",
            "From arrival to the last token.",
            buckets.REQUEST_S,
            "slo_class",
        )
        self.queue_s = histogram(
            "request_queue_time_seconds",
            "From arrival to the first chunk.",
            buckets.REQUEST_S,
            "slo_class",
        )

        # Parts of these, in seconds
        self.prefill_s = histogram(
            "request_prefill_time_seconds",
            "From the first chunk to the first token.",
            buckets.REQUEST_S,
        ).of()
        self.decode_s = histogram(
            "request_decode_time_seconds",
            "From the first token to the last.",
            buckets.REQUEST_S,
        ).of()
        self.inference_s = histogram(
            "request_inference_time_seconds",
            "From the first chunk to the last token.",
            buckets.REQUEST_S,
        ).of()

        # In tokens and completions
        self.request_prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", buckets.TOKENS
        ).of()
        self.request_computed_tokens = histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that had to be computed.",
            buckets.TOKENS,
        ).of()
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Tokens generated for a request.", buckets.TOKENS
        ).of()
        self.longest_generation = histogram(
            "request_max_num_generation_tokens",
            "Tokens of the longest of a prompt's completions.",
            buckets.TOKENS,
        ).of()
        self.params_max_tokens = histogram(
            "request_params_max_tokens", "The parameter max_tokens.", buckets.TOKENS
        ).of()
        self.params_n = histogram("request_params_n", "The parameter n.", buckets.COMPLETIONS).of()
