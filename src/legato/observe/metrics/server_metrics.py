"""All Prometheus metrics of a server; docs/reference/metrics.md is their reference."""

from collections.abc import Callable, Mapping

from legato.core.slo import SloClass
from legato.core.stats import CacheInfo, EngineStats, KeptPromise, ReplicaStats
from legato.observe.metrics.engine_metrics import StepMetrics, declare_engine_metrics
from legato.observe.metrics.prefix import MetricsPrefix
from legato.observe.metrics.process_metrics import ProcessMetrics
from legato.observe.metrics.registry import Declaration, MetricRegistry
from legato.observe.metrics.replica_metrics import declare_replica_metrics
from legato.observe.metrics.request_metrics import RequestMetrics
from legato.observe.metrics.slo_metrics import SloMetrics
from legato.observe.metrics.tenant_metrics import TenantMetrics


class ServerMetrics:
    """All metrics that ``/metrics`` shows, in a registry of its own.

    Names and meanings are vLLM's, except for the prefix.

    Args:
        model_name: label of every metric.
        prefix: of metrics that vLLM has too.
        stats, num_restarts: of the engine; called once a scrape.
        classes: of service; key the name.
        kept: as in `SloMetrics`.
        num_stuck: as in `declare_engine_metrics`.
        replicas: as in `declare_replica_metrics`.
        pids: as in `ProcessMetrics`.

    Attributes:
        requests, slos, tenants: what `JobRecorder` records.
        steps: must observe each step.
    """

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], EngineStats],
        num_restarts: Callable[[], int],
        *,
        cache: CacheInfo,
        classes: Mapping[str, SloClass],
        kept: Callable[[], Mapping[str, KeptPromise]],
        num_stuck: Callable[[], Mapping[str, int]] = dict,
        replicas: Callable[[], Mapping[str, ReplicaStats]] = dict,
        pids: Callable[[], Mapping[str, int]] = dict,
        prefix: MetricsPrefix = "legato",
    ) -> None:
        self._registry = MetricRegistry(model_name, prefix)
        self.slos = SloMetrics(self._registry, classes, kept)
        self.steps = StepMetrics(self._registry)
        declare_engine_metrics(self._registry, stats, num_restarts, num_stuck, cache)
        self.requests = RequestMetrics(self._registry, classes)
        self.tenants = TenantMetrics(self._registry, stats)
        declare_replica_metrics(self._registry, replicas)
        ProcessMetrics(self._registry, pids)

    @property
    def declared(self) -> list[Declaration]:
        """All metrics, in the order of the reference."""
        return self._registry.declared

    def count_error(self, status: int) -> None:
        """Count an HTTP request that was answered with `status`, an error."""
        self.requests.errors.of(str(status)).inc()

    def render(self, accepted: str = "") -> tuple[bytes, str]:
        """Return all metrics, and the media type. Args: accepted: as of `MetricRegistry.render`."""
        return self._registry.render(accepted)
