"""The search and its verdicts, on servers that are formulas."""

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.bench.capacity import (
    CapacityRule,
    Trial,
    UnloadedTtft,
    find_capacity,
    unloaded_workload,
)
from legato.bench.load.record import RequestRecord, Status
from legato.bench.workload.requests import (
    Workload,
    WorkloadRequest,
    mean_rate_per_s,
    with_poisson_arrivals,
)
from legato.core.errors import ConfigError

RULE = CapacityRule(itl_slo_s=0.1, unloaded=UnloadedTtft([100, 200], [1.0, 3.0]))
UNLOADED_S = 2.0  # of 150 tokens
GOOD_S, LATE_S = 0.0625, 0.125


def record(
    delay_s: float | None, gaps_s: Sequence[float] = (), arrival_s: float = 0.0
) -> RequestRecord:
    """A request of 150 tokens; without a delay it is refused."""
    request = WorkloadRequest(arrival_s, 150, 1 + len(gaps_s))
    times_s = []
    if delay_s is not None:
        times_s = [arrival_s + UNLOADED_S + delay_s]
        for gap_s in gaps_s:
            times_s.append(times_s[-1] + gap_s)
    return RequestRecord(
        request=request,
        sent_s=arrival_s,
        status="refused" if delay_s is None else "ok",
        token_times_s=times_s,
        num_tokens=len(times_s),
    )


def server(capacity_per_s: float) -> Callable[[float], list[RequestRecord]]:
    """Its gaps become late when it gets more than its capacity."""
    return lambda rate_per_s: [record(0.0, [GOOD_S if rate_per_s <= capacity_per_s else LATE_S])]


@given(st.floats(0.04, 4000.0), st.floats(0.01, 0.9))
def test_finds_the_capacity(capacity_per_s: float, precision: float) -> None:
    told: list[Trial] = []
    found = find_capacity(server(capacity_per_s), RULE, precision=precision, on_trial=told.append)
    assert found.rate_per_s <= capacity_per_s < found.rate_per_s * (1 + precision) * (1 + 1e-9)
    assert found.trials == told
    assert all(trial.is_sustained == (trial.rate_per_s <= capacity_per_s) for trial in told)
    assert len({trial.rate_per_s for trial in told}) == len(told)
    assert len(told) <= 14 + math.log2(1 / precision)


def test_starts_where_it_is_told() -> None:
    found = find_capacity(server(100.0), RULE, start_rate_per_s=90.0)
    assert [trial.rate_per_s for trial in found.trials[:2]] == [90.0, 180.0]


def test_begins_with_a_finite_rate() -> None:
    with pytest.raises(ConfigError, match="finite"):
        find_capacity(server(1.0), RULE, start_rate_per_s=math.inf)


def test_gives_up_on_servers_beyond_its_reach() -> None:
    assert find_capacity(server(0.0), RULE).rate_per_s == 0.0
    found = find_capacity(server(math.inf), RULE)
    assert found.rate_per_s == max(trial.rate_per_s for trial in found.trials)


def test_finds_where_a_queue_begins_to_grow() -> None:
    """A server that takes 0.2 s for each request, one after the other."""
    requests = [WorkloadRequest(0.0, 150, 1)] * 2000

    def run_trial(rate_per_s: float) -> list[RequestRecord]:
        free_s, records = 0.0, []
        for request in with_poisson_arrivals(requests, rate_per_s, seed=0):
            free_s = max(free_s, request.arrival_s) + 0.2
            delay_s = free_s - 0.2 - request.arrival_s
            records.append(record(delay_s, arrival_s=request.arrival_s))
        return records

    found = find_capacity(run_trial, RULE, precision=0.02)
    drawn = mean_rate_per_s(with_poisson_arrivals(requests, found.rate_per_s, seed=0))
    assert drawn == pytest.approx(5.0, rel=0.05)


@pytest.mark.parametrize(
    ("records", "is_sustained"),
    [
        ([record(2.0), record(2.0)], True),
        ([record(0.0), record(9.0)], True),
        ([record(0.0), record(9.0), record(2.5)], False),
        ([record(0.0, [GOOD_S] * 99 + [LATE_S])], True),
        ([record(0.0, [GOOD_S] * 98 + [LATE_S])], False),
        ([record(0.0, [GOOD_S] * 98 + [LATE_S] * 2)], False),
        ([record(0.0)] * 99 + [record(None)], True),
        ([record(0.0)] * 98 + [record(None)], False),
    ],
)
def test_what_is_sustained(records: list[RequestRecord], is_sustained: bool) -> None:
    trial = RULE.judge(1.0, records)
    assert trial.is_sustained == is_sustained


def test_what_a_trial_tells() -> None:
    records = [record(0.5, [GOOD_S]), record(None), record(1.0, [LATE_S]), record(9.0)]
    trial = RULE.judge(3.0, records)
    assert trial == Trial(
        rate_per_s=3.0,
        num_requests=4,
        num_failed=1,
        p99_itl_s=LATE_S,
        median_delay_s=1.0,
        is_sustained=False,
    )
    nothing = RULE.judge(3.0, [record(None)] * 2)
    assert (nothing.p99_itl_s, nothing.median_delay_s) == (None, None)


records_of_a_trial = st.lists(
    st.builds(
        record,
        st.one_of(st.none(), st.floats(0.0, 8.0)),
        st.lists(st.sampled_from([GOOD_S, LATE_S]), max_size=3),
        st.floats(0.0, 10.0),
    ),
    min_size=1,
    max_size=12,
)


@given(records_of_a_trial, st.floats(0.0, 25.0))
def test_a_trial_is_given_up_only_when_it_is_lost(
    records: list[RequestRecord], now_s: float
) -> None:
    workload = [record.request for record in records]
    seen = [as_seen_at(now_s, r) for r in records if r.request.arrival_s <= now_s]
    if RULE.is_lost(workload, now_s, seen):
        assert not RULE.judge(1.0, seen).is_sustained
        assert not RULE.judge(1.0, records).is_sustained
    assert RULE.is_lost(workload, 100.0, records) != RULE.judge(1.0, records).is_sustained


def as_seen_at(now_s: float, ended: RequestRecord) -> RequestRecord:
    times_s = [at_s for at_s in ended.token_times_s if at_s <= now_s]
    has_ended = len(times_s) == len(ended.token_times_s)
    status: Status = ended.status if has_ended else "cancelled"
    return RequestRecord(
        request=ended.request,
        sent_s=ended.sent_s,
        status=status,
        token_times_s=times_s,
        num_tokens=len(times_s),
    )


def test_unloaded_ttft_is_the_best_of_each_length_and_linear_between() -> None:
    def idle(num_prompt: int, ttft_s: float) -> RequestRecord:
        request = WorkloadRequest(5.0, num_prompt, 1)
        times_s = [5.0 + ttft_s]
        return RequestRecord(request=request, sent_s=5.0, status="ok", token_times_s=times_s)

    unloaded = UnloadedTtft.of([idle(200, 2.0), idle(100, 4.0), idle(100, 1.0), idle(200, 3.0)])
    assert unloaded == UnloadedTtft([100, 200], [1.0, 2.0])
    assert [unloaded.at(length) for length in (50, 100, 125, 200, 500)] == [1, 1, 1.25, 2, 2]
    with pytest.raises(ConfigError, match="idle server"):
        UnloadedTtft.of([idle(100, 1.0), record(None)])


@given(st.lists(st.integers(1, 8000), min_size=1, max_size=50))
def test_unloaded_workload_spans_the_lengths(lengths: list[int]) -> None:
    workload: Workload = [WorkloadRequest(0.0, length, 9) for length in lengths]
    alone = {request.num_prompt_tokens for request in unloaded_workload(workload)}
    assert {min(lengths), max(lengths)} <= alone <= set(lengths)
    assert len(alone) <= 5
