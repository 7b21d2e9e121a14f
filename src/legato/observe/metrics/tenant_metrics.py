"""Metrics by tenant: each of the first few tenants, and all others together."""

from collections.abc import Callable
from operator import attrgetter

from legato.core.stats import OTHER_TENANTS, EngineStats, TenantStats
from legato.observe.metrics.registry import MetricRegistry, Rows
from legato.observe.metrics.request_metrics import TTFT_S

_LABEL = "tenant"


class TenantMetrics:
    """Each tenant's use of the engine, and its waits.

    Args:
        stats: returns the engine's latest, which say which tenants are shown by name.
    """

    def __init__(self, registry: MetricRegistry, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats
        tenants = registry.section("Tenants")
        tenants.read_counters(
            "tenant_service_seconds",
            "Predicted time of steps, as far as it was a tenant's requests'.",
            _LABEL,
            read=self._by_tenant(attrgetter("service_s")),
            own=True,
        )
        tenants.read_gauges(
            "tenant_requests_running",
            "Requests of a tenant that have blocks.",
            _LABEL,
            read=self._by_tenant(attrgetter("num_running")),
            own=True,
        )
        tenants.read_gauges(
            "tenant_requests_waiting",
            "Requests of a tenant that do not run yet.",
            _LABEL,
            read=self._by_tenant(attrgetter("num_waiting")),
            own=True,
        )
        tenants.read_counters(
            "tenant_requests_refused",
            "Completions of a tenant refused because of load.",
            _LABEL,
            read=self._by_tenant(attrgetter("num_refused")),
            own=True,
        )
        self._ttft_s = tenants.histogram(
            "tenant_time_to_first_token_seconds",
            "From arrival to the first token.",
            TTFT_S,
            _LABEL,
            own=True,
        )

    def _by_tenant(self, number: Callable[[TenantStats], float]) -> Callable[[], Rows]:
        return lambda: {(tenant.name,): number(tenant) for tenant in self._stats().tenants}

    def first_token(self, tenant: str, ttft_s: float) -> None:
        """Record the first token of a tenant's completion."""
        is_shown = any(shown.name == tenant for shown in self._stats().tenants)
        self._ttft_s.of(tenant if is_shown else OTHER_TENANTS).observe(ttft_s)
