"""Fitting a workload into a context, for any workload."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.errors import ConfigError
from legato_lab.simulation.workload import Workload, WorkloadRequest
from legato_lab.workload.too_long import fit_into
from tests.lab.test_workload import lengths, workloads

contexts = st.integers(2, 20_000)


def num_prompt_tokens(workload: Workload) -> int:
    return sum(request.num_prompt_tokens for request in workload)


@given(workloads, contexts)
def test_what_is_cut_or_dropped_is_told(workload: Workload, context: int) -> None:
    num_long = sum(sum(pair) > context for pair in lengths(workload))
    cut, told = fit_into(workload, context, "cut")
    assert len(cut) == len(workload)
    assert all(sum(pair) <= context for pair in lengths(cut))
    if told is None:
        assert (num_long, cut) == (0, workload)
        return
    assert (told.num_cut, told.num_dropped, told.num_requests) == (num_long, 0, len(workload))
    kept = num_prompt_tokens(cut) / num_prompt_tokens(workload)
    assert told.share_of_tokens == pytest.approx(1.0 - kept)


@given(workloads, contexts)
def test_what_is_dropped_is_exactly_what_is_too_long(workload: Workload, context: int) -> None:
    fitting = [r for r in workload if r.num_prompt_tokens + r.num_output_tokens <= context]
    if not fitting:
        with pytest.raises(ConfigError, match="no request fits"):
            fit_into(workload, context, "drop")
        return
    kept, told = fit_into(workload, context, "drop")
    assert kept == fitting
    if told is not None:
        assert told.num_dropped == len(workload) - len(fitting)


def test_a_refusal_names_the_ways_out() -> None:
    workload = [WorkloadRequest(0.0, 90, 10), WorkloadRequest(0.0, 200, 5)]
    assert fit_into(workload, 205, "refuse") == (workload, None)
    with pytest.raises(ConfigError) as error:
        fit_into(workload, 204, "refuse")
    assert str(error.value) == (
        "1 of 2 requests are longer than the context of 204 tokens, the longest has 205: "
        "--too-long cut shortens their prompts, --too-long drop leaves them out"
    )
