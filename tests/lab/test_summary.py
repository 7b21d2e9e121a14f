"""Records and their figures, against numbers worked out by hand."""

from typing import Any

import pytest

from legato.core.slo import SloClass
from legato_lab.simulation.record import RequestRecord
from legato_lab.simulation.summary import Slos, summarize, summarize_classes
from legato_lab.simulation.workload import WorkloadRequest


def record(
    arrival_s: float, *token_times_s: float, slo_class: str | None = None, **fields: Any
) -> RequestRecord:
    """A request of 10 prompt tokens, sent 0.1 s late."""
    given = {"status": "ok", "num_tokens": len(token_times_s), "sent_s": arrival_s + 0.1, **fields}
    request = WorkloadRequest(arrival_s, 10, len(token_times_s) or 1, slo_class)
    return RequestRecord(request=request, token_times_s=list(token_times_s), **given)


FAST = record(1.0, 1.5, 1.75, 2.0)
SLOW = record(2.0, 4.0, 5.0, 5.5, 11.0)
SINGLE = record(3.0, 3.25)
REFUSED = record(4.0, status="refused", retry_after_s=2.0)
BROKEN = record(4.5, 5.0, 5.1, status="error", error="broke off")
CANCELLED = record(5.0, 5.5, status="cancelled")
ALL = [FAST, SLOW, SINGLE, REFUSED, BROKEN, CANCELLED]


def test_what_a_record_tells() -> None:
    assert SLOW.ttft_s == 2.0  # from its arrival, although it was sent later
    assert SLOW.itl_s.tolist() == [1.0, 0.5, 5.5]
    assert SLOW.tpot_s == pytest.approx(7.0 / 3)
    assert SLOW.e2e_s == 9.0
    assert (SINGLE.ttft_s, SINGLE.tpot_s, SINGLE.itl_s.size) == (0.25, None, 0)
    assert (REFUSED.ttft_s, REFUSED.e2e_s, REFUSED.itl_s.size) == (None, None, 0)


def test_tokens_that_came_together_count_one_by_one_in_tpot() -> None:
    assert record(0.0, 1.0, 2.0, num_tokens=5).tpot_s == 0.25


def test_summary_by_hand() -> None:
    summary = summarize(ALL, Slos())
    assert summary.num_requests == {"ok": 3, "refused": 1, "error": 1, "cancelled": 1}
    assert summary.duration_s == 10.0  # from 1.0 to 11.0
    assert summary.requests_per_s == 0.3
    assert summary.output_tokens_per_s == 0.8
    assert summary.total_tokens_per_s == 3.8
    assert summary.ttft_s is not None
    assert summary.ttft_s.mean == pytest.approx(2.75 / 3)
    assert (summary.ttft_s.p50, summary.ttft_s.max) == (0.5, 2.0)
    assert summary.ttft_s.p90 == pytest.approx(0.5 + 0.8 * 1.5)
    assert summary.itl_s is not None
    assert summary.itl_s.mean == pytest.approx(7.5 / 5)
    assert summary.itl_s.p50 == 0.5
    assert summary.itl_s.p95 == pytest.approx(1.0 + 0.8 * 4.5)
    assert summary.itl_s.p99 == pytest.approx(1.0 + 0.96 * 4.5)
    assert summary.tpot_s is not None
    assert summary.tpot_s.max == pytest.approx(7.0 / 3)
    assert summary.e2e_s is not None
    assert summary.e2e_s.p50 == 1.0


@pytest.mark.parametrize(
    ("slo", "num_attained"),
    [
        (SloClass(), 3),
        (SloClass(ttft_s=0.5), 2),
        (SloClass(ttft_s=0.49), 1),
        (SloClass(itl_s=0.25), 2),
        (SloClass(itl_s=5.5), 3),
        (SloClass(tpot_s=0.25), 2),
        (SloClass(ttft_s=0.4, itl_s=0.2), 1),
    ],
)
def test_attainment_is_of_all_requests(slo: SloClass, num_attained: int) -> None:
    summary = summarize(ALL, Slos(default=slo))
    assert summary.attainment == num_attained / 6
    assert summary.goodput_per_s == num_attained / 10.0


@pytest.mark.parametrize(("num_gaps", "num_late", "is_met"), [
    (100, 1, True), (100, 2, False), (99, 1, False), (200, 2, True), (1, 0, True),
])  # fmt: skip
def test_one_gap_in_a_hundred_may_be_late(num_gaps: int, num_late: int, is_met: bool) -> None:
    times_s = [0.0]
    for index in range(num_gaps):
        times_s.append(times_s[-1] + (1.0 if index < num_late else 0.1))
    slos = Slos(default=SloClass(itl_s=0.5))
    assert slos.are_met(record(0.0, *times_s)) == is_met


def test_classes_have_slos_of_their_own_and_rates_that_add_up() -> None:
    records = [
        record(0.0, 2.0, slo_class="interactive"),
        record(0.0, 4.0, slo_class="batch"),
        record(0.0, 8.0, slo_class="batch"),
        record(0.0, 0.5),
    ]
    slos = Slos(default=SloClass(ttft_s=1.0), by_class={"batch": SloClass(ttft_s=5.0)})
    classes = summarize_classes(records, slos)
    assert list(classes) == ["batch", "interactive"]
    assert classes["batch"].attainment == 0.5
    assert classes["interactive"].attainment == 0.0
    overall = summarize(records, slos)
    assert overall.attainment == 0.5
    assert [summary.duration_s for summary in (overall, *classes.values())] == [8.0] * 3
    assert classes["batch"].requests_per_s + classes["interactive"].requests_per_s == 3 / 8.0


def test_nothing_happened() -> None:
    for records in ([], [REFUSED]):
        summary = summarize(records, Slos())
        assert summary.ttft_s is None
        assert summary.itl_s is None
        assert summary.attainment == summary.goodput_per_s == summary.requests_per_s == 0.0
    assert summarize_classes([], Slos()) == {}
