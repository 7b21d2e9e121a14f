"""The numbers of several engines as those of one, field by field."""

from typing import TypeVar

import msgspec
import pytest

from legato.core.stats import EngineStats, TenantStats, TransferStats
from legato_fleet.totals import FleetTotals

_Stats = TypeVar("_Stats", bound=msgspec.Struct)

NOT_SUMMED = {
    *("step_time_margin", "broken_promise", "tenants", "transfer", "kv_usage", "num_cached_blocks"),
    "window_usage",
}  # fmt: skip
OF_THE_PRESENT = {"num_running", "num_waiting", "num_leases", "num_state_checkpoints"}


def filled(kind: type[_Stats], first: int) -> _Stats:
    """Every number another, from `first` on, which may be read as whole or not."""
    fields = msgspec.structs.fields(kind)
    numbers = {
        field.name: field.type(first + place)
        for place, field in enumerate(fields)
        if field.type in (int, float)
    }
    return kind(**{"name": "t"} | numbers if kind is TenantStats else numbers)


def engine(first: int) -> EngineStats:
    return msgspec.structs.replace(
        filled(EngineStats, first),
        broken_promise=f"of {first}",
        tenants=(filled(TenantStats, first),),
        transfer=filled(TransferStats, first),
    )


def numbers(stats: msgspec.Struct) -> dict[str, float]:
    """The summed ones; key the field."""
    found = msgspec.structs.asdict(stats)
    return {name: found[name] for name in found.keys() - NOT_SUMMED - {"name"}}


def parts(stats: EngineStats) -> list[msgspec.Struct]:
    assert stats.transfer is not None
    (tenant,) = stats.tenants
    return [stats, tenant, stats.transfer]


def test_each_number_is_a_sum() -> None:
    ours, theirs = engine(10), engine(200)
    total = FleetTotals().of([ours, theirs])
    for one, other, both in zip(*map(parts, (ours, theirs, total)), strict=True):
        assert numbers(both)
        for name, value in numbers(both).items():
            assert value == numbers(one)[name] + numbers(other)[name], name


def test_what_is_no_sum_is_the_worst_or_the_average() -> None:
    ours, theirs = engine(10), engine(200)
    total = FleetTotals().of([ours, theirs])
    assert total.step_time_margin == theirs.step_time_margin
    assert total.broken_promise == "of 10"
    assert total.kv_usage == pytest.approx((ours.kv_usage + theirs.kv_usage) / 2)
    assert total.num_cached_blocks == (ours.num_cached_blocks + theirs.num_cached_blocks) // 2


def test_of_an_engine_that_is_gone_its_counters_stay() -> None:
    totals, gone, left = FleetTotals(), engine(10), engine(200)
    totals.note_gone(gone)
    for one, other, both in zip(*map(parts, (gone, left, totals.of([left]))), strict=True):
        for name, value in numbers(both).items():
            stays = 0 if name in OF_THE_PRESENT else numbers(one)[name]
            assert value == stays + numbers(other)[name], name
    total = totals.of([left])
    assert (total.broken_promise, total.step_time_margin) == ("of 200", left.step_time_margin)
    assert (total.kv_usage, total.num_cached_blocks) == (left.kv_usage, left.num_cached_blocks)


def test_without_engines_there_is_nothing() -> None:
    assert FleetTotals().of([]) == EngineStats()


def test_of_window_blocks_the_fullest_engine_counts() -> None:
    first, second = (EngineStats(window_usage=usage) for usage in ({8: 0.5, 16: 0.1}, {8: 0.2}))
    totals = FleetTotals()
    assert totals.of([first, second]).window_usage == {8: 0.5, 16: 0.1}
    totals.note_gone(first)
    assert totals.of([second]).window_usage == {8: 0.2}
