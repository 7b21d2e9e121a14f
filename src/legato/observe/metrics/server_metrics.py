"""All Prometheus metrics of a server; docs/reference/metrics.md is their reference."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import cast

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from legato.core.slo import SloClass
from legato.core.stats import (
    OTHER_TENANTS,
    CacheInfo,
    EngineStats,
    KeptPromise,
    ReplicaStats,
    TenantStats,
)
from legato.observe.metrics.engine_metrics import StepMetrics, declare_engine_metrics
from legato.observe.metrics.prefix import MetricsPrefix
from legato.observe.metrics.registry import MODEL_LABEL, Declaration, Kind, MetricRegistry, Rows
from legato.observe.metrics.request_metrics import TTFT_S, RequestMetrics
from legato.observe.metrics.slo_metrics import SloMetrics

_PROCESS_LABEL = "process"
_PROCESSES = "Processes"

_REPLICA_LABEL = "replica"

_TENANT_LABEL = "tenant"


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

    def render(self, accepted: str = "") -> tuple[Iterator[bytes], str]:
        """Return all metrics, and the media type: see `MetricRegistry.render`."""
        return self._registry.render(accepted)


class ProcessMetrics(Collector):
    """Processor time, memory and files of processes, as `process_*`; only on Linux.

    Args:
        pids: called once a scrape; key the process's name.
    """

    def __init__(self, registry: MetricRegistry, pids: Callable[[], Mapping[str, int]]) -> None:
        self._model_name = registry.model_name
        self._pids = pids
        for metric in ProcessCollector(registry=None).collect():
            registry.declared.append(
                Declaration(
                    _PROCESSES,
                    cast("Kind", metric.type),
                    metric.name,
                    (_PROCESS_LABEL,),
                    metric.documentation,
                    is_own=False,
                )
            )
        registry.collectors.register(self)

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for process, pid in self._pids().items():
            labels = {MODEL_LABEL: self._model_name, _PROCESS_LABEL: process}
            for metric in ProcessCollector(pid=partial(int, pid), registry=None).collect():
                empty = Metric(metric.name, metric.documentation, metric.type)
                family = families.setdefault(metric.name, empty)
                for sample in metric.samples:
                    family.add_sample(sample.name, labels, sample.value)
        return families.values()


def declare_replica_metrics(
    registry: MetricRegistry, replicas: Callable[[], Mapping[str, ReplicaStats]]
) -> None:
    """Declare the metrics of each replica of a fleet; a server of one engine has none.

    Args:
        replicas: called once a scrape for each metric; key the replica's id.
    """
    section = registry.section("Replicas")
    for name, text, attribute in (
        ("replica_requests_running", "Requests of a replica that have blocks.", "num_running"),
        ("replica_requests_waiting", "Requests of a replica that do not run yet.", "num_waiting"),
        (
            "replica_kv_cache_usage_perc",
            "Fraction of a replica's KV cache in use.",
            "kv_usage",
        ),
        (
            "replica_forecast_ttft_seconds",
            "TTFT that a replica forecasts for a short prompt.",
            "delay_s",
        ),
        (
            "replica_start_time_seconds",
            "When a replica began to serve, in Unix time.",
            "started_s",
        ),
    ):
        section.read_gauges(
            name, text, _REPLICA_LABEL, read=_by_replica(replicas, attribute), own=True
        )


def _by_replica(
    replicas: Callable[[], Mapping[str, ReplicaStats]], attribute: str
) -> Callable[[], Rows]:
    number: Callable[[ReplicaStats], float] = attrgetter(attribute)
    return lambda: {(replica_id,): number(one) for replica_id, one in replicas().items()}


class TenantMetrics:
    """The use of the engine, and the waits, of the first few tenants and of all others together.

    Args:
        stats: returns the engine's latest, which say which tenants are shown by name.
    """

    def __init__(self, registry: MetricRegistry, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats
        tenants = registry.section("Tenants")
        tenants.read_counters(
            "tenant_service_seconds",
            "Predicted time of steps, as far as it was a tenant's requests'.",
            _TENANT_LABEL,
            read=self._by_tenant(attrgetter("service_s")),
            own=True,
        )
        tenants.read_gauges(
            "tenant_requests_running",
            "Requests of a tenant that have blocks.",
            _TENANT_LABEL,
            read=self._by_tenant(attrgetter("num_running")),
            own=True,
        )
        tenants.read_gauges(
            "tenant_requests_waiting",
            "Requests of a tenant that do not run yet.",
            _TENANT_LABEL,
            read=self._by_tenant(attrgetter("num_waiting")),
            own=True,
        )
        tenants.read_counters(
            "tenant_requests_refused",
            "Completions of a tenant refused because of load.",
            _TENANT_LABEL,
            read=self._by_tenant(attrgetter("num_refused")),
            own=True,
        )
        self._ttft_s = tenants.histogram(
            "tenant_time_to_first_token_seconds",
            "From arrival to the first token.",
            TTFT_S,
            _TENANT_LABEL,
            own=True,
        )

    def _by_tenant(self, number: Callable[[TenantStats], float]) -> Callable[[], Rows]:
        return lambda: {(tenant.name,): number(tenant) for tenant in self._stats().tenants}

    def first_token(self, tenant: str, ttft_s: float) -> None:
        """Record the first token of a tenant's completion."""
        is_shown = any(shown.name == tenant for shown in self._stats().tenants)
        self._ttft_s.of(tenant if is_shown else OTHER_TENANTS).observe(ttft_s)
