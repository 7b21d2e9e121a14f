"""Reports on the gaps of delivered tokens."""

import pytest

from legato.core.slo import SloClass
from legato.engine.client import deliveries
from legato.engine.client.deliveries import Deliveries, RecentGaps, StreamDelivery

CLASSES = {"gold": SloClass(itl_s=0.1, itl_quantile=0.9), "batch": SloClass()}


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(deliveries.time, "monotonic", lambda: self.now_s)


def test_a_quantile_is_of_the_last_minute() -> None:
    gaps = RecentGaps(0.1)
    assert gaps.quantile_s(0.99, 5.0) is None
    for _ in range(99):
        gaps.add(0.0305, 5.0)
    gaps.add(3.0, 25.0)
    assert gaps.quantile_s(0.99, 30.0) == pytest.approx(0.031)
    assert gaps.quantile_s(0.999, 30.0) == pytest.approx(0.4, abs=0.002)
    assert gaps.quantile_s(0.5, 65.0) == pytest.approx(0.4, abs=0.002)
    assert gaps.quantile_s(0.99, 90.0) is None


def test_gaps_are_between_the_times_at_which_tokens_were_handed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, told = Clock(monkeypatch), Deliveries(CLASSES, lambda _: None)
    gold, batch = StreamDelivery("gold"), StreamDelivery("batch")
    for gap_s in (0.0, *[0.05] * 9, 0.2):
        clock.now_s += gap_s
        for stream in (gold, batch):
            told.note(stream, clock.now_s)
    kept = told.kept()
    assert list(kept) == ["gold"]
    assert kept["gold"].delivered_s == pytest.approx(0.05, abs=0.0011)
    told.promise({"gold": SloClass(itl_s=1.0)})
    assert told.kept()["gold"].delivered_s is None


def test_the_engine_is_told_how_the_way_of_mixed_steps_differed() -> None:
    delay_change_s: list[float] = []
    told = Deliveries(CLASSES, delay_change_s.append)
    for way_s, is_mixed in ((0.001, False), (0.004, True), (0.002, True), (0.003, False)):
        told.end_step(100.0, 100.0 + way_s, is_mixed=is_mixed)
    assert delay_change_s == pytest.approx([0.003, -0.002])
