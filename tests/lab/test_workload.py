"""Operations on workloads, for any workload."""

import itertools
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.errors import ConfigError
from legato_lab.simulation.workload import (
    Workload,
    WorkloadRequest,
    cut_to,
    mean_rate_per_s,
    num_hash_blocks,
    rescaled,
    with_poisson_arrivals,
    within,
)

requests = st.builds(
    WorkloadRequest,
    st.integers(0, 10_000).map(lambda hundredths: hundredths / 100),
    st.integers(1, 10_000),
    st.integers(1, 10_000),
    st.sampled_from([None, "batch"]),
).flatmap(
    lambda request: st.lists(
        st.integers(0, 2**64 - 1), max_size=num_hash_blocks(request.num_prompt_tokens)
    ).map(lambda ids: msgspec.structs.replace(request, hash_ids=tuple(ids)))
)
workloads = st.lists(requests, min_size=1, max_size=30).map(
    lambda drawn: sorted(drawn, key=lambda request: request.arrival_s)
)
rates = st.floats(0.01, 1000.0)


def lengths(workload: Workload) -> list[tuple[int, int]]:
    return [(request.num_prompt_tokens, request.num_output_tokens) for request in workload]


def arrivals(workload: Workload) -> list[float]:
    return [request.arrival_s for request in workload]


@given(workloads, rates, st.integers(0, 100))
def test_poisson_arrivals_keep_requests_and_begin_at_0(
    workload: Workload, rate: float, seed: int
) -> None:
    arriving = with_poisson_arrivals(workload, rate, seed)
    assert lengths(arriving) == lengths(workload)
    assert [r.slo_class for r in arriving] == [r.slo_class for r in workload]
    assert arrivals(arriving) == sorted(arrivals(arriving))
    assert arriving[0].arrival_s == 0.0
    assert arriving == with_poisson_arrivals(workload, rate, seed)


@given(workloads, rates, st.floats(0.1, 10.0), st.integers(0, 100))
def test_poisson_arrivals_of_one_seed_are_stretched(
    workload: Workload, rate: float, factor: float, seed: int
) -> None:
    slow = arrivals(with_poisson_arrivals(workload, rate, seed))
    fast = arrivals(with_poisson_arrivals(workload, rate * factor, seed))
    assert fast == pytest.approx([arrival_s / factor for arrival_s in slow])


def test_poisson_gaps_are_exponential() -> None:
    workload = with_poisson_arrivals([WorkloadRequest(0.0, 1, 1)] * 20_001, 5.0, seed=1)
    gaps = [b.arrival_s - a.arrival_s for a, b in itertools.pairwise(workload)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.03)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), rel=0.03)


@given(workloads.filter(lambda w: math.isfinite(mean_rate_per_s(w))), rates)
def test_rescaled_has_the_rate_and_the_pattern(workload: Workload, rate: float) -> None:
    stretched = rescaled(workload, rate)
    assert lengths(stretched) == lengths(workload)
    assert mean_rate_per_s(stretched) == pytest.approx(rate)
    stretch = mean_rate_per_s(workload) / rate
    start_s = workload[0].arrival_s
    expected = [(arrival_s - start_s) * stretch for arrival_s in arrivals(workload)]
    assert arrivals(stretched) == pytest.approx(expected)


@given(workloads)
def test_infinite_rate_sends_all_at_once(workload: Workload) -> None:
    at_once = [0.0] * len(workload)
    assert arrivals(with_poisson_arrivals(workload, math.inf, seed=0)) == at_once
    if math.isfinite(mean_rate_per_s(workload)):
        assert arrivals(rescaled(workload, math.inf)) == at_once


def test_no_pattern_to_rescale() -> None:
    with pytest.raises(ConfigError, match="no pattern"):
        rescaled([WorkloadRequest(0.0, 1, 1)] * 2, 1.0)


@given(workloads, st.integers(2, 12_000))
def test_cut_to_fits_and_cuts_no_more_than_it_must(workload: Workload, max_model_len: int) -> None:
    cut = cut_to(workload, max_model_len)
    assert arrivals(cut) == arrivals(workload)
    for before, after in zip(workload, cut, strict=True):
        num_tokens = after.num_prompt_tokens + after.num_output_tokens
        assert num_tokens <= max_model_len
        assert after.num_output_tokens == min(before.num_output_tokens, max_model_len - 1)
        if num_tokens < max_model_len:
            assert after == before
    assert cut_to(cut, max_model_len) == cut


@given(workloads, st.floats(0.0, 120.0))
def test_within(workload: Workload, duration_s: float) -> None:
    kept = within(workload, duration_s)
    assert kept == workload[: len(kept)]
    assert all(arrival_s < duration_s for arrival_s in arrivals(kept))
    assert all(arrival_s >= duration_s for arrival_s in arrivals(workload[len(kept) :]))


@pytest.mark.parametrize("values", [(-0.1, 1, 1), (0.0, 0, 1), (0.0, 1, 0)])
def test_impossible_request(values: tuple[float, int, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least"):
        WorkloadRequest(*values)
