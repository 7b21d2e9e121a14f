"""Workloads drawn from quantiles have those quantiles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.errors import ConfigError
from legato_lab.workload.choice import WorkloadChoice
from legato_lab.workload.quantiles import draw_quantiles

CODE = "prompt p50=1469 p90=5194 p99=7436, output p50=13 p90=55"


def test_quantiles_are_met() -> None:
    workload = draw_quantiles(CODE, 20_000, seed=0)
    prompts = [request.num_prompt_tokens for request in workload]
    outputs = [request.num_output_tokens for request in workload]
    assert np.quantile(prompts, [0.5, 0.9, 0.99]) == pytest.approx([1469, 5194, 7436], rel=0.05)
    assert np.quantile(outputs, [0.5, 0.9]) == pytest.approx([13, 55], rel=0.08)
    assert max(outputs) > 55


@given(median=st.integers(1, 4000), longer=st.integers(0, 4000), seed=st.integers(0, 9))
def test_one_seed_always_gives_the_same(median: int, longer: int, seed: int) -> None:
    text = f"output p50={median}, prompt p50={median} p99={median + longer}"
    drawn = draw_quantiles(text, 50, seed)
    assert drawn == draw_quantiles(text, 50, seed)
    assert {request.num_output_tokens for request in drawn} == {median}
    assert min(request.num_prompt_tokens for request in drawn) >= 1


def test_they_can_be_chosen_as_any_workload() -> None:
    choice = WorkloadChoice(source=CODE, num_requests=30, rate_per_s=2.0, max_model_len=2000)
    workload = choice.load()
    assert len(workload) == 30
    assert workload[-1].arrival_s > 1.0
    assert max(r.num_prompt_tokens + r.num_output_tokens for r in workload) <= 2000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt p50=10", "form"),
        ("prompt p50=10, prompt p50=10", "form"),
        ("prompt p50=10, output 13", "form"),
        ("prompt p50=10 p50=20, output p50=1", "percentiles"),
        ("prompt p0=10, output p50=1", "percentiles"),
        ("prompt p50=10 p90=9, output p50=1", "tokens"),
        ("prompt p50=0, output p50=1", "tokens"),
    ],
)
def test_what_is_not_of_this_form(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WorkloadChoice(source=text).load()
