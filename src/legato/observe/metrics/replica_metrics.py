"""Metrics of each replica of a fleet; a server of one engine has none."""

from collections.abc import Callable, Mapping
from operator import attrgetter

from legato.core.stats import ReplicaStats
from legato.observe.metrics.registry import MetricRegistry, Rows

_LABEL = "replica"


def declare_replica_metrics(
    registry: MetricRegistry, replicas: Callable[[], Mapping[str, ReplicaStats]]
) -> None:
    """Args: replicas: called once a scrape for each metric; key the replica's id."""
    section = registry.section("Replicas")
    for name, text, attribute in (
        ("replica_requests_running", "Requests of a replica that have blocks.", "num_running"),
        ("replica_requests_waiting", "Requests of a replica that do not run yet.", "num_waiting"),
        (
            "replica_kv_cache_usage_perc",
            "Fraction of a replica's KV cache in use, 1 is all.",
            "kv_usage",
        ),
        (
            "replica_forecast_ttft_seconds",
            "When a replica would have the first token of a short prompt that came now.",
            "delay_s",
        ),
        (
            "replica_start_time_seconds",
            "When a replica began to serve, in Unix time.",
            "started_s",
        ),
    ):
        section.read_gauges(name, text, _LABEL, read=_by_replica(replicas, attribute), own=True)


def _by_replica(
    replicas: Callable[[], Mapping[str, ReplicaStats]], attribute: str
) -> Callable[[], Rows]:
    number: Callable[[ReplicaStats], float] = attrgetter(attribute)
    return lambda: {(replica_id,): number(one) for replica_id, one in replicas().items()}
