"""A plan says why each chunk is no longer, and why no other request was admitted."""

from typing import Any

from legato.scheduler.step_costs import ROW_BOUNDS, StepCosts
from legato.scheduler.step_time import StepTimeModel
from tests.scheduler.harness import Harness
from tests.scheduler.step_times import calibrate

MS_A_TOKEN = StepCosts(
    step_s=0.001,
    row_s=(0.001,) * (len(ROW_BOUNDS) + 1),
    decode_row_s=0.0,
    decode_context_s=0.0,
    chunk_s=0.0,
    area_s=0.0,
    context_s=0.0,
    sample_s=0.0,
)


def reasons(harness: Harness) -> list[dict[str, str]]:
    """Of each step; key request id."""
    return [{c.request_id: c.ended_by or c.kind for c in plan.chunks} for plan in harness.plans]


def promising(**settings: Any) -> Harness:
    """A harness on a machine that takes a millisecond a token, and knows it."""
    model = StepTimeModel(calibrate(MS_A_TOKEN, 100))
    return Harness(step_time=model, max_model_len=100, budget=64, **settings)


def test_chunks_end_with_the_token_budget_and_with_the_prompt() -> None:
    harness = Harness(budget=8)
    harness.add("a", 10, max_tokens=3)
    harness.drain()
    expected = [{"a": "token_budget"}, {"a": "prompt_end"}, {"a": "decode"}, {"a": "decode"}]
    assert reasons(harness) == expected
    assert {plan.budget_tokens for plan in harness.plans} == {8}
    assert {plan.limit_s for plan in harness.plans} == {None}


def test_chunks_end_where_a_token_is_due() -> None:
    harness = promising(itl_slo_s=0.03)
    harness.add("stream", 1, max_tokens=20)
    harness.step()
    harness.add("prompt", 50)
    harness.step()
    plan = harness.plans[-1]
    assert reasons(harness)[-1] == {"stream": "decode", "prompt": "time_budget"}
    assert plan.limit_s is not None
    assert plan.predicted_s is not None
    assert plan.predicted_s <= plan.limit_s <= 0.03


def test_chunks_end_where_memory_ran_out() -> None:
    harness = Harness(budget=64)
    harness.add("a", 60)
    plan = harness.plan()
    assert plan is not None
    harness.run(plan, ["a"], out_of_memory=True)
    harness.drain()
    assert reasons(harness)[:3] == [{"a": "prompt_end"}, {"a": "memory"}, {"a": "prompt_end"}]


def test_a_promised_chunk_is_shorter_for_a_turn() -> None:
    harness = Harness(budget=8, ttft_slo_s=1.0, max_model_len=1000, num_blocks=1000)
    harness.add("batch", 3, slo_class="batch")
    harness.add("promised", 200)
    for _ in range(10):
        harness.step()
    assert {"batch": "prompt_end", "promised": "turn"} in reasons(harness)


def test_who_waits_is_held_by_the_budget_then_by_nothing() -> None:
    harness = Harness(budget=8)
    harness.add("a", 8)
    harness.add("b", 8)
    harness.step()
    harness.step()
    first, second = harness.plans
    assert (first.held_by, second.held_by) == ("budget", None)
    assert (set(first.admitted), set(second.admitted)) == ({"a"}, {"b"})


def test_who_waits_is_held_by_the_number_that_may_run() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add("a", 2)
    harness.add("b", 2)
    harness.step()
    assert harness.plans[-1].held_by == "max_num_seqs"


def test_who_waits_is_held_by_memory() -> None:
    harness = Harness(num_blocks=4, block_size=4, max_model_len=16)
    harness.add("a", 3, max_tokens=4)
    harness.add("b", 15, max_tokens=1)
    harness.step()
    assert harness.plans[-1].held_by == "memory"


def test_who_waits_is_held_by_the_pace_of_the_streams() -> None:
    harness = promising(itl_slo_s=0.0045)
    for request_id in "abcd":
        harness.add(request_id, 1, max_tokens=20)
    harness.step()
    assert harness.plans[-1].held_by == "pace"


def test_admission_says_what_was_cached() -> None:
    harness = Harness(block_size=4)
    harness.add("a", prompt=range(10))
    harness.drain()
    harness.add("b", prompt=range(10))
    harness.step()
    assert harness.plans[0].admitted == {"a": 0}
    assert harness.plans[-1].admitted == {"b": 8}
