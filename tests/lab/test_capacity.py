"""The search and its verdicts, on servers that are formulas."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.errors import ConfigError
from legato_lab.capacity.rule import CapacityRule, TrialWatch
from legato_lab.capacity.search import Capacity, SearchSettings, TrialLength, find_capacity
from legato_lab.capacity.trial import Load, Trial
from legato_lab.capacity.unloaded import UnloadedTtft, unloaded_workload
from legato_lab.simulation.record import RequestRecord, Status
from legato_lab.simulation.workload import Workload, WorkloadRequest
from legato_lab.workload.mixes import draw_mix
from legato_lab.workload.trials import TrialSource
from tests.profiles import examples

RULE = CapacityRule(itl_slo_s=0.1, unloaded=UnloadedTtft([100, 200], [1.0, 3.0]))
BY_ATTAINMENT = msgspec.structs.replace(RULE, least_attainment=0.9)
SHORT = TrialLength(least_s=0.6, least_requests=1)
SETTINGS = SearchSettings(itl_slo_s=0.1, precision=0.1, length=SHORT)
LOAD = Load(rate_per_s=1.0, measured_s=60.0)
"""Whose measured part is from 10 to 70 s."""
SOURCE = TrialSource([WorkloadRequest(0.0, 150, 2)])
UNLOADED_S = 2.0  # of 150 tokens
GOOD_S, LATE_S = 0.0625, 0.125


def record(
    delay_s: float | None, gaps_s: Sequence[float] = (), arrival_s: float = 10.0
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


Serve = Callable[[Load, Workload], list[RequestRecord]]


def server(capacity_per_s: float) -> Serve:
    """Its gaps become late when it gets more than its capacity."""

    def serve(load: Load, _workload: Workload) -> list[RequestRecord]:
        gap_s = GOOD_S if load.rate_per_s <= capacity_per_s else LATE_S
        return [record(-UNLOADED_S, [gap_s], load.warm_up_s)]  # so that trials are short

    return serve


def queue(service_s: float) -> Serve:
    """A server that takes so long for each request, one after the other, until the load ends."""

    def serve(load: Load, workload: Workload) -> list[RequestRecord]:
        free_s, records = 0.0, []
        for request in workload:
            free_s = max(free_s, request.arrival_s) + service_s
            ended = record(free_s - service_s - request.arrival_s, arrival_s=request.arrival_s)
            records.append(as_seen_at(load.end_s, ended))
        return records

    return serve


def find(serve: Serve, rule: CapacityRule = RULE, **settings: Any) -> Capacity:
    return find_capacity(serve, SOURCE, rule, msgspec.structs.replace(SETTINGS, **settings))


@examples(50)
@given(st.floats(0.04, 4000.0), st.floats(0.01, 0.9))
def test_finds_the_largest_rate(capacity_per_s: float, precision: float) -> None:
    found = find(server(capacity_per_s), precision=precision)
    [best] = found.best
    assert best.rate_per_s <= capacity_per_s < best.rate_per_s * (1 + precision) * (1 + 1e-9)
    assert all(trial.is_sustained == (trial.rate_per_s <= capacity_per_s) for trial in found.trials)
    assert len({trial.rate_per_s for trial in found.trials}) == len(found.trials)
    assert len(found.trials) <= 14 + math.log2(1 / precision)


def test_starts_where_it_is_told_and_further_seeds_near_the_answer() -> None:
    found = find(server(100.0), start_rate_per_s=90.0, num_seeds=3, seed=7)
    by_seed = {seed: [t.rate_per_s for t in found.trials if t.load.seed == seed] for seed in (7, 8)}
    assert by_seed[7][:2] == [90.0, 180.0]
    assert by_seed[8][0] == found.best[0].rate_per_s
    assert len(by_seed[8]) == 2
    assert [trial.load.seed for trial in found.best] == [7, 8, 9]


def test_begins_with_a_finite_rate() -> None:
    with pytest.raises(ConfigError, match="finite"):
        find(server(1.0), start_rate_per_s=math.inf)


def test_gives_up_on_servers_beyond_its_reach() -> None:
    nothing = find(server(0.0))
    assert (nothing.rate_per_s, nothing.best) == (0.0, [])
    few = find(server(0.0), start_rate_per_s=1.0, least_rate_per_s=0.2)
    assert [trial.rate_per_s for trial in few.trials] == [1.0, 0.5, 0.25]
    found = find(server(math.inf))
    assert found.best[0].rate_per_s == max(trial.rate_per_s for trial in found.trials)


@pytest.mark.parametrize("least_s", [120.0, 240.0, 480.0])
def test_finds_where_a_queue_begins_to_grow(least_s: float) -> None:
    """Capacity is never more than can be served, for any length of a trial."""
    length = TrialLength(least_s=least_s)
    found = find(queue(0.2), length=length, num_seeds=3, precision=0.01)
    assert found.rate_per_s == pytest.approx(4.9, rel=0.025)
    assert max(found.rates_per_s) <= 5.0


def test_a_queue_that_grows_is_not_sustained_however_short_its_delay() -> None:
    load = Load(rate_per_s=5.1, measured_s=120.0)
    evenly = [WorkloadRequest(place / 5.1, 150, 2) for place in range(load.num_requests)]
    trial = RULE.judge(load, queue(0.2)(load, evenly))
    assert trial.median_delay_s is not None
    assert trial.median_delay_s < RULE.max_delay_s
    assert trial.broken == ["delay grows"]


def test_requests_that_pile_up_behind_their_first_tokens_are_not_sustained() -> None:
    load = Load(rate_per_s=5.0, measured_s=120.0)
    workload = SOURCE.draw(5.0, load.num_requests, seed=0)
    # One of four never ends.
    piled = [
        record(0.0, [GOOD_S] if place % 4 else [1000.0], request.arrival_s)
        for place, request in enumerate(workload)
    ]
    trial = RULE.judge(load, [as_seen_at(load.end_s, ended) for ended in piled])
    assert trial.broken == ["falls behind"]
    assert trial.finished_per_s == pytest.approx(0.75 * 5.0, rel=0.05)


def test_a_trial_lasts_twenty_end_to_end_times_and_has_as_many_requests_as_asked_for() -> None:
    """Each takes 30 s here, and up to one a second are served well."""

    def serve(load: Load, workload: Workload) -> list[RequestRecord]:
        gap_s = 4.0 if load.rate_per_s <= 1.0 else 7.0
        ended = [record(0.0, [gap_s] * 7, request.arrival_s) for request in workload]
        return [as_seen_at(load.end_s, each) for each in ended]

    rule = msgspec.structs.replace(RULE, itl_slo_s=5.0)
    length = TrialLength(least_requests=400)
    found = find(serve, rule, start_rate_per_s=0.5, precision=1.5, length=length)
    for trial in found.trials:
        assert trial.measured_s >= 20 * 30.0
        assert trial.num_requests == pytest.approx(trial.rate_per_s * trial.measured_s, rel=0.1)
    assert found.trials[0].measured_s == 400 / 0.5
    assert found.trials[1].measured_s == 1.25 * 20 * 30.0


@pytest.mark.parametrize(
    ("records", "broken"),
    [
        ([record(2.0), record(2.0)], []),
        ([record(0.0), record(9.0)], []),
        ([record(0.0), record(9.0), record(2.5)], ["delay"]),
        ([record(0.0, [GOOD_S] * 99 + [LATE_S])], []),
        ([record(0.0, [GOOD_S] * 98 + [LATE_S])], ["ITL"]),
        ([record(0.0, [GOOD_S] * 98 + [LATE_S] * 2)], ["ITL"]),
        ([record(0.0)] * 99 + [record(None)], []),
        ([record(0.0)] * 98 + [record(None)], ["failures"]),
        ([record(0.0)] * 99 + [record(9.0, [LATE_S] * 99, arrival_s=9.0)], []),
        ([record(0.0)] * 2 + [record(1.5, arrival_s=40.0)] * 3, ["delay grows"]),
        ([record(0.0)] * 2 + [record(0.5, arrival_s=40.0)] * 3, []),
    ],
)
def test_what_is_sustained(records: list[RequestRecord], broken: list[str]) -> None:
    assert RULE.judge(LOAD, records).broken == broken


def test_attainment_sees_long_stalls_of_few_requests() -> None:
    smooth, stalled = record(0.0, [GOOD_S] * 100), record(0.0, [GOOD_S] * 98 + [9.0, 9.0])
    for num_stalled, is_attained in ((1, True), (2, False)):
        records = [stalled] * num_stalled + [smooth] * (10 - num_stalled)
        assert BY_ATTAINMENT.judge(LOAD, records).is_sustained == is_attained
        pooled = RULE.judge(LOAD, [*records, *[smooth] * 300])
        assert (pooled.is_sustained, pooled.longest_itl_s) == (True, 9.0)
    assert BY_ATTAINMENT.judge(LOAD, [smooth] * 9 + [record(None)]).broken == ["failures"]


def test_what_a_trial_tells() -> None:
    records = [record(0.5, [GOOD_S]), record(None), record(1.0, [LATE_S]), record(9.0)]
    early = record(0.0, [GOOD_S], arrival_s=9.0)  # ends within the measured part
    trial = RULE.judge(LOAD, [early, *records])
    assert trial == Trial(
        load=LOAD,
        measured_s=11.0,  # it was lost there
        num_requests=4,
        num_failed=1,
        finished_per_s=4 / 11.0,
        p99_itl_s=LATE_S,
        longest_itl_s=LATE_S,
        attainment=0.5,
        median_delay_s=1.0,
        delay_growth_s=None,
        median_e2e_s=UNLOADED_S + 1.0 + LATE_S,
        broken=["ITL", "failures"],
    )
    nothing = RULE.judge(LOAD, [record(None)] * 2)
    assert (nothing.p99_itl_s, nothing.median_delay_s) == (None, None)


def test_an_interval_needs_several_seeds() -> None:
    several = Capacity(rates_per_s=[1.0, 2.0, 3.0], num_source_requests=1, rule=RULE, trials=[])
    assert several.rate_per_s == 2.0
    assert several.interval_per_s is not None
    # Student's t of two degrees of freedom: 4.303.
    assert several.interval_per_s[1] - 2.0 == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert several.interval_per_s[0] == 0.0
    one = Capacity(rates_per_s=[1.0], num_source_requests=1, rule=RULE, trials=[])
    assert one.interval_per_s is None


records_of_a_trial = st.lists(
    st.builds(
        record,
        st.one_of(st.none(), st.floats(0.0, 8.0)),
        st.lists(st.sampled_from([GOOD_S, LATE_S]), max_size=3),
        st.floats(5.0, 20.0),
    ),
    min_size=1,
    max_size=12,
)


@given(
    st.sampled_from([RULE, BY_ATTAINMENT]),
    records_of_a_trial,
    st.lists(st.floats(5.0, 35.0), min_size=1, max_size=3).map(sorted),
)
def test_a_trial_is_given_up_only_when_it_is_lost(
    rule: CapacityRule, records: list[RequestRecord], looks_s: list[float]
) -> None:
    workload = [ended.request for ended in records]
    watch = TrialWatch(rule, LOAD, workload)
    for now_s in looks_s:
        seen = [as_seen_at(now_s, r) for r in records if r.request.arrival_s <= now_s]
        is_lost = TrialWatch(rule, LOAD, workload).is_lost(now_s, seen)
        assert not is_lost or not rule.judge(LOAD, seen).is_sustained
        assert not is_lost or not rule.judge(LOAD, records).is_sustained
    sent = sorted(records, key=lambda ended: ended.request.arrival_s)
    for now_s in looks_s:
        seen = [as_seen_at(now_s, r) for r in sent if r.request.arrival_s <= now_s]
        # What it has kept of earlier looks changes nothing.
        assert watch.is_lost(now_s, seen) == TrialWatch(rule, LOAD, workload).is_lost(now_s, seen)


def test_a_trial_far_behind_its_arrivals_is_given_up() -> None:
    load = Load(rate_per_s=5.0, measured_s=120.0)
    workload = SOURCE.draw(5.0, load.num_requests, seed=0)
    ended = queue(0.3)(load, workload)
    lost_s = next(
        now_s
        for now_s in range(int(load.end_s))
        if TrialWatch(RULE, load, workload).is_lost(
            now_s, [as_seen_at(now_s, r) for r in ended if r.request.arrival_s <= now_s]
        )
    )
    assert load.warm_up_s < lost_s < load.end_s * 0.6


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


def test_a_trial_is_like_its_source() -> None:
    requests = draw_mix("chat", 3000, seed=0)
    source = TrialSource(requests)
    drawn = source.draw(2.0, 300, seed=0)
    for field in ("num_prompt_tokens", "num_output_tokens"):
        mean = np.mean([getattr(request, field) for request in requests])
        assert np.mean([getattr(request, field) for request in drawn]) == pytest.approx(mean, 0.03)
    assert drawn != source.draw(2.0, 300, seed=1)
    assert [r.num_prompt_tokens for r in drawn] != sorted(r.num_prompt_tokens for r in drawn)


@given(st.integers(1, 40), st.integers(1, 100), st.integers(0, 9))
def test_trials_draw_each_request_once_before_any_again(
    num_source: int, num_drawn: int, seed: int
) -> None:
    source = TrialSource([WorkloadRequest(0.0, place + 1, 1) for place in range(num_source)])
    drawn = Counter(request.num_prompt_tokens for request in source.draw(2.0, num_drawn, seed))
    times = [drawn[place + 1] for place in range(num_source)]
    assert sum(times) == num_drawn
    assert max(times) - min(times) <= 1
    with pytest.raises(ConfigError, match="no requests"):
        TrialSource([])


def test_trials_differ_only_in_their_rate() -> None:
    slow, fast = SOURCE.draw(1.0, 1000, seed=0), SOURCE.draw(2.0, 1000, seed=0)
    assert [r.arrival_s for r in fast] == pytest.approx([r.arrival_s / 2 for r in slow])
    gaps_s = [later.arrival_s - earlier.arrival_s for earlier, later in pairwise(slow)]
    assert slow[-1].arrival_s < 1000.0
    # As many are longer than their mean as in an exponential distribution.
    assert sum(gap_s > 1.0 for gap_s in gaps_s) / 1000 == pytest.approx(math.exp(-1), abs=0.05)


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
