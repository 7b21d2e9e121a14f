"""Adds the counters of several engines up, as if they were one."""

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from legato.core.stats import OTHER_TENANTS, EngineStats, TenantStats, TransferStats


class Totals:
    """Sums over present and past engines, so that counters never fall."""

    def __init__(self) -> None:
        self._gone = EngineStats()
        self._num_tried_again: Counter[str] = Counter()  # key: tenant

    def note_gone(self, stats: EngineStats) -> None:
        """Add an engine that is gone. Args: stats: its last."""
        tenants = [replace(one, num_running=0, num_waiting=0) for one in stats.tenants]
        transfer = stats.transfer and replace(stats.transfer, num_leases=0)
        counts = replace(
            stats,
            step_time_margin=0.0,
            broken_promise="",
            tenants=tuple(tenants),
            transfer=transfer,
        )
        self._gone = replace(_sum([self._gone, counts]), num_running=0, num_waiting=0)

    def note_tried_again(self, tenant: str) -> None:
        """Count a refused request that goes to another engine, and so does not count as refused."""
        self._num_tried_again[tenant] += 1

    def of(self, stats: Sequence[EngineStats]) -> EngineStats:
        """Return the sums, the averages of cache sizes, and the worst margin and broken promise."""
        num = max(1, len(stats))
        total = _sum([self._gone, *stats])
        names = {one.name for one in total.tenants}
        tried_again: Counter[str] = Counter()
        for name, count in self._num_tried_again.items():
            tried_again[name if name in names else OTHER_TENANTS] += count
        return replace(
            total,
            tenants=tuple(
                replace(one, num_refused=one.num_refused - tried_again[one.name])
                for one in total.tenants
            ),
            kv_usage=sum(one.kv_usage for one in stats) / num,
            num_cached_blocks=sum(one.num_cached_blocks for one in stats) // num,
        )


def _sum(stats: Sequence[EngineStats]) -> EngineStats:
    return EngineStats(
        num_running=sum(one.num_running for one in stats),
        num_waiting=sum(one.num_waiting for one in stats),
        num_preemptions=sum(one.num_preemptions for one in stats),
        num_steps_over_budget=sum(one.num_steps_over_budget for one in stats),
        step_time_margin=max(one.step_time_margin for one in stats),
        broken_promise=next((one.broken_promise for one in stats if one.broken_promise), ""),
        num_prefix_cache_queries=sum(one.num_prefix_cache_queries for one in stats),
        num_prefix_cache_hits=sum(one.num_prefix_cache_hits for one in stats),
        tenants=_summed_tenants(tenant for one in stats for tenant in one.tenants),
        num_failed_steps=sum(one.num_failed_steps for one in stats),
        num_contained_errors=sum(one.num_contained_errors for one in stats),
        transfer=_summed_transfers([one.transfer for one in stats if one.transfer is not None]),
    )


def _summed_transfers(stats: Sequence[TransferStats]) -> TransferStats | None:
    if not stats:
        return None
    return TransferStats(
        num_bytes=sum(one.num_bytes for one in stats),
        read_s=sum(one.read_s for one in stats),
        num_fetched=sum(one.num_fetched for one in stats),
        num_recomputed=sum(one.num_recomputed for one in stats),
        num_leases=sum(one.num_leases for one in stats),
        num_expired=sum(one.num_expired for one in stats),
    )


def _summed_tenants(tenants: Iterable[TenantStats]) -> tuple[TenantStats, ...]:
    by_name: dict[str, TenantStats] = {}
    for one in tenants:
        so_far = by_name.get(one.name)
        if so_far is not None:
            one = TenantStats(
                name=one.name,
                num_running=so_far.num_running + one.num_running,
                num_waiting=so_far.num_waiting + one.num_waiting,
                num_refused=so_far.num_refused + one.num_refused,
                service_s=so_far.service_s + one.service_s,
            )
        by_name[one.name] = one
    return tuple(by_name.values())
