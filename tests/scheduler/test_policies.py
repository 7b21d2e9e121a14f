"""The schedules that the policies make, step by step."""

import pytest

from legato.core.config import SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.outputs import FinishReason
from tests.scheduler.harness import Harness


def schedule(harness: Harness) -> list[dict[str, int]]:
    """Tokens per request, step by step."""
    return [{c.request_id: c.num_tokens for c in plan.chunks} for plan in harness.plans]


def run_beside_a_decode(**settings: object) -> list[dict[str, int]]:
    """R1 decodes, then R2 arrives with a prompt of 10 tokens; budget 4."""
    harness = Harness(**{"budget": 4, **settings})  # type: ignore[arg-type]
    harness.add("R1", 2, max_tokens=6)
    harness.step()
    harness.add("R2", 10, max_tokens=2)
    harness.drain()
    return schedule(harness)


def test_stall_free_packs_chunks_beside_decodes() -> None:
    assert run_beside_a_decode() == [
        {"R1": 2},
        {"R1": 1, "R2": 3},
        {"R1": 1, "R2": 3},
        {"R1": 1, "R2": 3},
        {"R1": 1, "R2": 1},
        {"R1": 1, "R2": 1},
    ]


def test_prefill_first_makes_the_running_stream_wait() -> None:
    assert run_beside_a_decode(policy="prefill-first") == [
        {"R1": 2},
        {"R2": 4},
        {"R2": 4},
        {"R2": 2},
        {"R1": 1, "R2": 1},
        {"R1": 1},
        {"R1": 1},
        {"R1": 1},
        {"R1": 1},
    ]


def test_without_chunking_the_prompt_is_one_chunk() -> None:
    steps = run_beside_a_decode(enable_chunked_prefill=False, max_model_len=64, budget=72)
    assert steps[1] == {"R1": 1, "R2": 10}


def test_the_rest_of_the_budget_goes_to_the_next_prompt() -> None:
    harness = Harness(budget=8, prefill_order="fcfs")
    harness.add("a", 5)
    harness.add("b", 6)
    harness.add("c", 1)
    harness.step()
    harness.step()
    assert schedule(harness) == [{"a": 5, "b": 3}, {"a": 1, "b": 3, "c": 1}]


def test_one_too_many_waiting_is_refused() -> None:
    harness = Harness(max_waiting=2)
    for request_id in "abc":
        harness.add(request_id, 4)
    assert harness.finish_reasons == {"a": [], "b": [], "c": [FinishReason.REFUSED]}
    harness.drain()
    assert harness.finish_reasons["a"] == [FinishReason.LENGTH]


def test_decodes_alone_may_exceed_the_budget_and_are_counted() -> None:
    harness = Harness(policy="prefill-first", budget=2, max_num_seqs=3)
    for request_id in "abc":
        harness.add(request_id, 2, max_tokens=2)
    harness.drain()
    assert schedule(harness) == [{"a": 2}, {"b": 2}, {"c": 2}, {"a": 1, "b": 1, "c": 1}]
    assert harness.scheduler.stats.num_steps_over_budget == 1


def test_an_abort_in_flight_keeps_its_blocks_until_commit() -> None:
    harness = Harness()
    harness.add("a", 8)
    plan = harness.plan()
    assert plan is not None
    harness.abort("a")
    assert harness.kv.num_free_blocks == 62
    assert harness.finish_reasons["a"] == []
    harness.run(plan)
    assert harness.kv.num_free_blocks == 64
    assert harness.finish_reasons["a"] == [FinishReason.ABORT]
    assert harness.tokens["a"] == []


def test_an_error_ends_its_own_request_only() -> None:
    harness = Harness()
    harness.add("a", 4)
    harness.add("b", 4)
    plan = harness.plan()
    assert plan is not None
    harness.run(plan, failing=["a"])
    harness.drain()
    assert harness.finish_reasons == {"a": [FinishReason.ERROR], "b": [FinishReason.LENGTH]}
    assert harness.tokens["b"] == harness.expected_tokens("b")


def test_an_abort_outlives_the_failure_of_its_step() -> None:
    harness = Harness()
    harness.add("a", 4)
    plan = harness.plan()
    assert plan is not None
    harness.abort("a")
    harness.run(plan, failing=["a"])
    assert harness.finish_reasons == {"a": [FinishReason.ABORT]}


def test_chunks_are_shorter_for_a_while_after_memory_ran_out() -> None:
    harness = Harness(budget=64, num_blocks=200, max_model_len=700)
    harness.add("a", 600, max_tokens=1)
    sizes = []
    while harness.scheduler.has_work:
        plan = harness.plan()
        assert plan is not None
        if plan.num_tokens > 32 and harness.clock() < 60:
            harness.run(plan, failing=["a"], out_of_memory=True)
            harness.clock.advance_to(harness.clock() + 1)
        else:
            sizes.append(plan.num_tokens)
            harness.run(plan)
            harness.clock.advance_to(harness.clock() + 10)
    # It is tried again after 30 s, in vain, and once more 30 s later.
    assert sizes == [32, 32, 32, 32, 32, 32, 64, 64, 64, 64, 64, 64, 24]
    assert harness.tokens["a"] == harness.expected_tokens("a")


def test_chunks_are_shorter_also_where_the_step_could_be_computed_in_parts() -> None:
    harness = Harness(budget=64)
    harness.add("a", 100)
    plan = harness.plan()
    assert plan is not None
    harness.run(plan, out_of_memory=True)
    plan = harness.step()
    assert plan is not None
    assert plan.num_tokens == 32


def test_what_cannot_be_shorter_ends_for_want_of_memory() -> None:
    for settings in ({"budget": 16}, {"enable_chunked_prefill": False, "budget": 200}):
        harness = Harness(**settings)  # type: ignore[arg-type]
        harness.add("a", 40)
        plan = harness.plan()
        assert plan is not None
        harness.run(plan, failing=["a"], out_of_memory=True)
        assert harness.finish_reasons == {"a": [FinishReason.ERROR]}


def test_the_executor_hears_of_each_request_once_and_of_its_end() -> None:
    harness = Harness(budget=64, num_blocks=8, block_size=4, max_model_len=32)
    for request_id in ("a", "b", "c"):
        harness.add(request_id, 12, max_tokens=12)
    harness.drain()
    introduced = [r.request_id for plan in harness.plans for r in plan.new_requests]
    ended = [request_id for plan in harness.plans for request_id in plan.ended_requests]
    assert sorted(introduced) == ["a", "b", "c"]
    assert len(ended) == len(set(ended)) == 2, "the last one ends after the last plan"


def test_a_budget_no_whole_prompt_fits_in_is_refused() -> None:
    config = SchedulerConfig(enable_chunked_prefill=False, max_num_batched_tokens=100)
    with pytest.raises(ConfigError, match="at least max_model_len"):
        config.resolve(max_model_len=100)


def test_what_a_failed_step_should_have_ended_is_ended_by_the_next() -> None:
    """The executor may never have got the failed plan; a new request may have the same id."""
    harness = Harness(max_num_seqs=4)
    for name, max_tokens in (("ended", 1), ("failing", 9), ("other", 9)):
        harness.add(name, 3, max_tokens=max_tokens)
    harness.step()
    plan = harness.plan()
    assert plan is not None
    assert plan.ended_requests == ("ended",)
    harness.run(plan, failing=["failing"])
    again = harness.plan()
    assert again is not None
    assert again.ended_requests == ("ended", "failing")
