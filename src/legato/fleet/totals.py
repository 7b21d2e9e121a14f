"""The numbers of several engines as those of one."""

from collections.abc import Iterable, Sequence

from legato.core.stats import EngineStats, TenantStats


def summed(stats: Sequence[EngineStats]) -> EngineStats:
    """Counts of all together; shares on the average, margins and broken promises of the worst."""
    return EngineStats(
        num_running=sum(one.num_running for one in stats),
        num_waiting=sum(one.num_waiting for one in stats),
        num_preemptions=sum(one.num_preemptions for one in stats),
        num_steps_over_budget=sum(one.num_steps_over_budget for one in stats),
        step_time_margin=max((one.step_time_margin for one in stats), default=0.0),
        broken_promise=next((one.broken_promise for one in stats if one.broken_promise), ""),
        num_prefix_cache_queries=sum(one.num_prefix_cache_queries for one in stats),
        num_prefix_cache_hits=sum(one.num_prefix_cache_hits for one in stats),
        tenants=_summed_tenants(tenant for one in stats for tenant in one.tenants),
        num_failed_steps=sum(one.num_failed_steps for one in stats),
        kv_usage=sum(one.kv_usage for one in stats) / len(stats) if stats else 0.0,
        num_cached_blocks=sum(one.num_cached_blocks for one in stats),
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
