"""Metrics of requests. Each prompt counts as a request, for any `n` of choices."""

from collections.abc import Iterable, Mapping

from legato.core.outputs import FinishReason, RefusalReason
from legato.core.slo import SloClass
from legato.observe.metrics.registry import MetricRegistry, count_of

INVALID = "invalid"
REFUSALS = (INVALID, *RefusalReason)
"""Reasons to refuse a request: it can never be served, or the scheduler's reasons."""

# Bounds of buckets: vLLM's, with finer ones near typical SLOs.
# fmt: off
_PER_TOKEN_S = (
    0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.125, 0.15,
    0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5,
    2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_REQUEST_S = (
    0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
_COMPLETIONS = (1.0, 2.0, 5.0, 10.0, 20.0)
# fmt: on
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


class RequestMetrics:
    """The metrics that `JobRecorder` records.

    Args:
        classes: of service; their promises become bounds of buckets; key the name.
    """

    def __init__(self, registry: MetricRegistry, classes: Mapping[str, SloClass]) -> None:
        refused = registry.section("Promises").counter(
            "request_refused",
            "Requests refused: `queue_full` (`--max-waiting`), `ttft_slo` (`--shed-load`), "
            "`invalid`.",
            "reason",
            own=True,
        )
        self.refused = {reason: refused.of(reason) for reason in REFUSALS}
        self._declare_latencies(registry, classes)
        self._declare_counts(registry)
        self._declare_sizes(registry)

    def num_refused(self) -> dict[str, int]:
        """Return how many requests were refused; key one of `REFUSALS`."""
        return {reason: count_of(counter) for reason, counter in self.refused.items()}

    def _declare_latencies(self, registry: MetricRegistry, classes: Mapping[str, SloClass]) -> None:
        histogram = registry.section("Latencies").histogram
        promised = classes.values()
        ttft_s = _with_bounds(TTFT_S, (slo.ttft_s for slo in promised))
        itl_s = _with_bounds(_PER_TOKEN_S, (slo.itl_s for slo in promised))
        tpot_s = _with_bounds(_PER_TOKEN_S, (slo.tpot_s for slo in promised))
        self.ttft_s = histogram(
            "time_to_first_token_seconds",
            "From arrival to the first token of any choice.",
            ttft_s,
            "slo_class",
        )
        self.itl_s = histogram(
            "inter_token_latency_seconds",
            "From one token to the next. Tokens that come at once have no gap.",
            itl_s,
            "slo_class",
        )
        self.tpot_s = histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a choice for each token after the first.",
            tpot_s,
            "slo_class",
        )
        self.e2e_s = histogram(
            "e2e_request_latency_seconds",
            "From arrival to the last token.",
            _REQUEST_S,
            "slo_class",
        )
        self.queue_s = histogram(
            "request_queue_time_seconds",
            "From arrival to the first chunk; parsing and tokenizing are part of it.",
            _REQUEST_S,
            "slo_class",
        )
        self.prefill_s = histogram(
            "request_prefill_time_seconds", "From the first chunk to the first token.", _REQUEST_S
        ).of()
        self.decode_s = histogram(
            "request_decode_time_seconds", "From the first token to the last.", _REQUEST_S
        ).of()
        self.inference_s = histogram(
            "request_inference_time_seconds", "From the first chunk to the last token.", _REQUEST_S
        ).of()

    def _declare_counts(self, registry: MetricRegistry) -> None:
        counter = registry.section("Requests").counter
        ended = counter(
            "request_success",
            "Requests that ended: `stop`, `length`, `abort`, `error`, `refused`; each as the "
            "last of its choices.",
            "finished_reason",
        )
        self.ended = {reason: ended.of(reason) for reason in FinishReason}
        choices = counter(
            "request_choices",
            "Sampled choices that ended, `n` of each request, by the same reasons.",
            "finished_reason",
            own=True,
        )
        self.choices = {reason: choices.of(reason) for reason in FinishReason}
        self.errors = counter(
            "request_errors", "HTTP requests answered with an error.", "status", own=True
        )
        self.warnings = counter(
            "request_warnings",
            "Answers whose `Warning` header names what of the request was ignored.",
            own=True,
        ).of()
        self.prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens, counted once a request, at its first token."
        ).of()
        self.cached_tokens = counter(
            "prompt_tokens_cached", "Prompt tokens found in the cache."
        ).of()
        self.generation_tokens = counter("generation_tokens", "Tokens generated.").of()

    def _declare_sizes(self, registry: MetricRegistry) -> None:
        histogram = registry.section("Requests").histogram
        self.request_prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS
        ).of()
        self.request_computed_tokens = histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that were computed.",
            _TOKENS,
        ).of()
        self.request_generation_tokens = histogram(
            "request_generation_tokens",
            "Tokens generated for a request, in all of its choices.",
            _TOKENS,
        ).of()
        self.longest_generation = histogram(
            "request_max_num_generation_tokens",
            "Tokens of the longest of a request's choices.",
            _TOKENS,
        ).of()
        self.params_max_tokens = histogram(
            "request_params_max_tokens", "The parameter `max_tokens`.", _TOKENS
        ).of()
        self.params_n = histogram("request_params_n", "The parameter `n`.", _COMPLETIONS).of()


def _with_bounds(
    buckets: tuple[float, ...], promises_s: Iterable[float | None]
) -> tuple[float, ...]:
    """Add a bound at each promise, so that the share within it is exact.

    Args:
        promises_s: in seconds; None for no promise.
    """
    return tuple(sorted({*buckets, *(s for s in promises_s if s is not None)}))
