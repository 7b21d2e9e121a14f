"""Adds the counters of several engines up, as if they were one.

Each field is summed unless it is named here, so that a new counter counts in a fleet, too.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from legato.core.stats import OTHER_TENANTS, EngineStats, TenantStats, TransferStats

_PRESENT = (
    "num_running",
    "num_waiting",
    "step_time_margin",
    "broken_promise",
    "kv_usage",
    "num_cached_blocks",
    "num_state_checkpoints",
    "window_usage",
)
"""Fields about the present, which an engine that is gone does not count in."""

_Stats = TypeVar("_Stats", bound=msgspec.Struct)


class FleetTotals:
    """Sums over present and past engines, so that counters never fall."""

    def __init__(self) -> None:
        self._gone = EngineStats()
        self._num_tried_again: Counter[str] = Counter()  # key: tenant

    def note_gone(self, stats: EngineStats) -> None:
        """Add an engine that is gone. Args: stats: its last."""
        tenants = [replace(one, num_running=0, num_waiting=0) for one in stats.tenants]
        transfer = stats.transfer and replace(stats.transfer, num_leases=0)
        nothing = EngineStats()
        counts = replace(
            stats,
            tenants=tuple(tenants),
            transfer=transfer,
            **{name: getattr(nothing, name) for name in _PRESENT},
        )
        self._gone = _combined([self._gone, counts], _COMBINED)

    def note_tried_again(self, tenant: str) -> None:
        """Count a refused request that goes to another engine, and so does not count as refused."""
        self._num_tried_again[tenant] += 1

    def of(self, stats: Sequence[EngineStats]) -> EngineStats:
        """Return the sums, the averages of cache sizes, and the worst of margins and promises.

        Of blocks of windows, the fullest engine counts.
        """
        num = max(1, len(stats))
        total = _combined([self._gone, *stats], _COMBINED)
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
            kv_usage=total.kv_usage / num,
            num_cached_blocks=total.num_cached_blocks // num,
        )


def _combined(
    stats: Sequence[_Stats], combined: dict[str, Callable[[Sequence[Any]], object]]
) -> _Stats:
    """One of the same kind.

    Args:
        combined: what becomes of a field's values; key the field. Those of all others are summed.
    """
    kind = type(stats[0])
    return kind(
        **{
            name: combined.get(name, sum)([getattr(one, name) for one in stats])
            for name in kind.__struct_fields__
        }
    )


def _first_told(reasons: Iterable[str]) -> str:
    return next(filter(None, reasons), "")


def _fullest(usages: Iterable[dict[int, float]]) -> dict[int, float]:
    fullest: dict[int, float] = {}
    for usage in usages:
        for window, share in usage.items():
            fullest[window] = max(share, fullest.get(window, 0.0))
    return fullest


def _combined_transfers(transfers: Iterable[TransferStats | None]) -> TransferStats | None:
    stats = [one for one in transfers if one is not None]
    return _combined(stats, {}) if stats else None


def _combined_tenants(tenants: Iterable[Iterable[TenantStats]]) -> tuple[TenantStats, ...]:
    by_name: dict[str, list[TenantStats]] = {}
    for engine in tenants:
        for one in engine:
            by_name.setdefault(one.name, []).append(one)
    return tuple(_combined(stats, {"name": lambda names: names[0]}) for stats in by_name.values())


_COMBINED: dict[str, Callable[[Sequence[Any]], object]] = {
    "step_time_margin": max,
    "broken_promise": _first_told,
    "window_usage": _fullest,
    "tenants": _combined_tenants,
    "transfer": _combined_transfers,
}
