"""Whether a lead is told from luck, and what nothing beats."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.slo import SloClass
from legato_lab.simulation.record import RequestRecord
from legato_lab.simulation.summary import Slos
from legato_lab.simulation.workload import WorkloadRequest
from legato_lab.tune.candidate import Candidate
from legato_lab.tune.front import pareto_front
from legato_lab.tune.lead import lead
from legato_lab.tune.score import Figures
from legato_lab.tune.search import Tried

SLOS = Slos(default=SloClass(ttft_s=1.0))


def records(kept: list[bool]) -> list[RequestRecord]:
    """Requests. Some had their first token in time, and all their last at 100 s."""
    return [
        RequestRecord(
            request=WorkloadRequest(0.0, 10, 2),
            sent_s=0.0,
            status="ok",
            token_times_s=[0.5 if is_kept else 2.0, 100.0],
            num_tokens=2,
        )
        for is_kept in kept
    ]


def test_a_clear_lead_is_sure() -> None:
    found = lead(records([True] * 90 + [False] * 10), records([True] * 60 + [False] * 40), SLOS, 0)
    assert found.of_goodput == pytest.approx(0.5)
    assert found.is_sure
    assert found.probability > 0.99


def test_two_requests_of_fifty_may_be_luck() -> None:
    first, second = [True] * 45 + [False] * 5, [True] * 43 + [False] * 6 + [True]
    found = lead(records(first), records(second), SLOS, 0)
    assert found.of_goodput > 0.0
    assert not found.is_sure
    assert 0.5 < found.probability < 0.99


def test_no_lead_over_oneself() -> None:
    same = records([True, False] * 10)
    found = lead(same, same, SLOS, 0)
    assert (found.of_goodput, found.low, found.high, found.probability) == (0.0, 0.0, 0.0, 0.5)


_figures = st.builds(
    Figures,
    goodput_per_s=st.just(1.0),
    attainment=st.just(1.0),
    itl_p99_s=st.integers(1, 5).map(float),
    ttft_p99_s=st.integers(1, 5).map(float),
    score=st.just(1.0),
    saturated_tokens_per_s=st.integers(1, 5).map(float),
)


def _beats(one: Figures, other: Figures) -> bool:
    pairs = (
        (other.saturated_tokens_per_s, one.saturated_tokens_per_s),
        (one.itl_p99_s, other.itl_p99_s),
        (one.ttft_p99_s, other.ttft_p99_s),
    )
    return all(a is not None and b is not None and a <= b for a, b in pairs)


@given(st.lists(_figures, max_size=30))
def test_the_front_beats_all_others_and_none_of_itself(figures: list[Figures]) -> None:
    tried = [
        Tried(
            candidate=Candidate(
                steps="fixed", max_num_batched_tokens=i + 1, max_num_seqs=1, prefill_order="fcfs"
            ),
            figures=one,
        )
        for i, one in enumerate(figures)
    ]
    front = pareto_front(tried)
    for one in tried:
        assert one in front or any(_beats(by.figures, one.figures) for by in front)
    for one in front:
        assert not any(_beats(by.figures, one.figures) for by in front if by is not one)
