"""Prometheus metrics. Names and meanings are vLLM's, with the prefix ``legato:``."""

from collections.abc import Iterable
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

# fmt: off
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
           10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
                10.0, 20.0, 40.0, 80.0)
_REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
              120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
# fmt: on
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_LABELS = ("model_name",)


class EngineSnapshot(Protocol):
    """The engine's counters after a step; those of a new engine begin anew."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def num_steps_over_budget(self) -> int: ...
    @property
    def num_failed_steps(self) -> int: ...
    @property
    def num_prefix_cache_queries(self) -> int: ...
    @property
    def num_prefix_cache_hits(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...
    @property
    def step_time_margin(self) -> float: ...
    @property
    def broken_promise(self) -> str: ...


class Engine(Protocol):
    """What is asked once a scrape."""

    @property
    def stats(self) -> EngineSnapshot: ...
    @property
    def num_restarts(self) -> int: ...


class Metrics:
    """Everything that ``/metrics`` shows, in a registry of its own.

    Args:
        model_name: label of every metric.
    """

    def __init__(self, model_name: str, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(model_name, engine))
        self._model_name = model_name
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens prefilled.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._ended = Counter(
            "legato:request_success",
            "Completions that ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._errors = Counter(
            "legato:request_errors",
            "HTTP requests answered with an error, by status.",
            (*_LABELS, "status"),
            registry=self._registry,
        )
        self.ttft_s = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _TTFT_S
        )
        self.itl_s = self._histogram(
            "inter_token_latency_seconds", "From one token to the next.", _PER_TOKEN_S
        )
        self.tpot_s = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean inter-token latency of a request.",
            _PER_TOKEN_S,
        )
        self.e2e_s = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_S
        )
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for a request.", _TOKENS
        )

    def count_ended(self, reason: str) -> None:
        """Count a completion that ended with `reason`, one of `FinishReason`."""
        self._ended.labels(self._model_name, reason).inc()

    def count_error(self, status: int) -> None:
        """Count an HTTP request that was answered with `status`."""
        self._errors.labels(self._model_name, str(status)).inc()

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        metric = Counter(f"legato:{name}", text, _LABELS, registry=self._registry)
        return metric.labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(
            f"legato:{name}", text, _LABELS, registry=self._registry, buckets=buckets
        )
        return metric.labels(self._model_name)


class RequestRecorder:
    """Measures one completion as its tokens arrive. Times are seconds on one monotonic clock."""

    def __init__(self, metrics: Metrics, *, num_prompt_tokens: int, arrival_s: float) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._arrival_s = arrival_s
        self._first_s = 0.0
        self._last_s = 0.0
        self._num_tokens = 0

    def add_tokens(self, num_tokens: int, now_s: float) -> None:
        """Tokens have arrived, at least one."""
        if self._num_tokens:
            self._metrics.itl_s.observe(now_s - self._last_s)
        else:
            self._first_s = now_s
            self._metrics.ttft_s.observe(now_s - self._arrival_s)
            self._metrics.prompt_tokens.inc(self._num_prompt_tokens)
        self._last_s = now_s
        self._num_tokens += num_tokens
        self._metrics.generation_tokens.inc(num_tokens)

    def end(self, reason: str, now_s: float) -> None:
        """The completion is over, for whatever reason; called once."""
        metrics = self._metrics
        metrics.count_ended(reason)
        if not self._num_tokens:
            return
        metrics.e2e_s.observe(now_s - self._arrival_s)
        metrics.request_prompt_tokens.observe(self._num_prompt_tokens)
        metrics.request_generation_tokens.observe(self._num_tokens)
        if self._num_tokens > 1:
            metrics.tpot_s.observe((self._last_s - self._first_s) / (self._num_tokens - 1))


class _EngineCollector(Collector):
    """Shows the engine's own counters, which live in its process."""

    def __init__(self, model_name: str, engine: Engine) -> None:
        self._model_name = model_name
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats
        gauges = (
            ("num_requests_running", "Requests in the running batch.", stats.num_running),
            ("num_requests_waiting", "Requests that wait to run.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV cache in use, 1 is all.", stats.kv_usage),
            (
                "step_time_margin",
                "Relative error that the step-time model allows for.",
                stats.step_time_margin,
            ),
            (
                "slo_unattainable",
                "1 where the latest step was bound to break an SLO.",
                float(bool(stats.broken_promise)),
            ),
        )
        for name, text, value in gauges:
            yield self._family(GaugeMetricFamily, name, text, value)
        counters = (
            ("num_preemptions", "Requests preempted for memory.", stats.num_preemptions),
            (
                "num_steps_over_budget",
                "Steps whose decodes alone exceeded their budget.",
                stats.num_steps_over_budget,
            ),
            ("num_failed_steps", "Steps that raised and were recovered.", stats.num_failed_steps),
            (
                "num_engine_restarts",
                "Times that the engine process died and was started again.",
                self._engine.num_restarts,
            ),
            (
                "prefix_cache_queries",
                "Prompt tokens looked up in the cache.",
                stats.num_prefix_cache_queries,
            ),
            (
                "prefix_cache_hits",
                "Prompt tokens that did not have to be computed.",
                stats.num_prefix_cache_hits,
            ),
        )
        for name, text, value in counters:
            yield self._family(CounterMetricFamily, name, text, value)

    def _family(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        text: str,
        value: float,
    ) -> Metric:
        family = kind(f"legato:{name}", text, labels=_LABELS)
        family.add_metric([self._model_name], value)
        return family
