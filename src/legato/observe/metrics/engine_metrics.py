"""The engine's own counters, which live in its process, as of its latest step."""

from collections.abc import Iterable
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from legato.observe.metrics.registry import MODEL_LABEL, PREFIX


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
    def num_cached_blocks(self) -> int: ...
    @property
    def step_time_margin(self) -> float: ...
    @property
    def broken_promise(self) -> str: ...


class CacheSize(Protocol):
    """What does not change of the KV cache."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def enable_prefix_caching(self) -> bool: ...


class Engine(Protocol):
    """What is asked once a scrape."""

    @property
    def stats(self) -> EngineSnapshot: ...
    @property
    def num_restarts(self) -> int: ...


class EngineCollector(Collector):
    """Reads the engine's snapshot when it is asked."""

    def __init__(self, model_name: str, engine: Engine, cache: CacheSize) -> None:
        self._model_name = model_name
        self._engine = engine
        self._cache = cache

    def collect(self) -> Iterable[Metric]:
        yield from self._gauges(self._engine.stats)
        yield from self._counters(self._engine.stats)
        yield self._cache_config()

    def _gauges(self, stats: EngineSnapshot) -> Iterable[Metric]:
        gauges = (
            ("num_requests_running", "Requests in the running batch.", stats.num_running),
            ("num_requests_waiting", "Requests that wait to run.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV cache in use, 1 is all.", stats.kv_usage),
            (
                "kv_cache_cached_perc",
                "Share of the KV cache kept for later requests, in use by none.",
                stats.num_cached_blocks / self._cache.num_blocks,
            ),
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

    def _counters(self, stats: EngineSnapshot) -> Iterable[Metric]:
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

    def _cache_config(self) -> Metric:
        """Under vLLM's labels, which say GPU whatever the device."""
        labels = {
            MODEL_LABEL: self._model_name,
            "block_size": str(self._cache.block_size),
            "num_gpu_blocks": str(self._cache.num_blocks),
            "enable_prefix_caching": str(self._cache.enable_prefix_caching),
        }
        family = GaugeMetricFamily(
            PREFIX + "cache_config_info", "Size of the KV cache; always 1.", labels=list(labels)
        )
        family.add_metric(list(labels.values()), 1.0)
        return family

    def _family(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        text: str,
        value: float,
    ) -> Metric:
        family = kind(PREFIX + name, text, labels=(MODEL_LABEL,))
        family.add_metric([self._model_name], value)
        return family
