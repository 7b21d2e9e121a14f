"""The schedules that shared prefixes make, and what the cache does not change."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.core.outputs import FinishReason
from legato.scheduler.order import ORDERS
from legato.scheduler.policy import POLICIES
from tests.kv.conservation import check_blocks
from tests.profiles import scaled
from tests.scheduler.harness import Harness

LONG = tuple(range(40))
NUM_OPERATIONS = scaled(2000)


def schedule(harness: Harness) -> list[dict[str, int]]:
    """Tokens per request, step by step."""
    return [{c.request_id: c.num_tokens for c in plan.chunks} for plan in harness.plans]


def test_two_equal_prompts_are_computed_once() -> None:
    """Budget 32: the first one's second chunk leaves room, but not for what it is computing."""
    harness = Harness(budget=32, prefill_order="fcfs")
    harness.add("a", prompt=LONG, max_tokens=2)
    harness.add("b", prompt=LONG, max_tokens=2)
    harness.drain()
    # 36 tokens are shared; the last block is each one's own.
    assert schedule(harness) == [{"a": 32}, {"a": 8}, {"a": 1, "b": 4}, {"b": 1}]
    assert harness.num_cached == {"a": 0, "b": 36}


def test_while_one_waits_for_a_block_others_go_on() -> None:
    harness = Harness(budget=32)
    harness.add("a", prompt=LONG[:20])
    harness.add("b", prompt=LONG[:20])
    harness.add("c", 10)
    harness.step()
    assert schedule(harness) == [{"a": 20, "c": 10}]


@pytest.mark.parametrize("order", ORDERS)
def test_a_follower_is_not_held_up_by_a_leader_that_is_aborted(order: str) -> None:
    harness = Harness(budget=48, prefill_order=order)
    harness.add("a", prompt=range(100))
    harness.add("b", prompt=range(100))
    harness.step()
    harness.abort("a")
    harness.drain()
    assert schedule(harness)[:3] == [{"a": 48}, {"b": 48}, {"b": 4}]
    assert harness.num_cached["b"] == 48


def test_a_follower_that_ranks_first_does_the_work_itself() -> None:
    harness = Harness(budget=16)
    harness.add("batch", prompt=LONG, slo_class="batch")
    harness.step()
    harness.add("urgent", prompt=LONG, priority=-1)
    harness.drain()
    assert schedule(harness)[1:4] == [{"urgent": 16}, {"urgent": 8}, {"urgent": 1, "batch": 4}]


def test_what_a_failed_step_wrote_is_not_shared() -> None:
    harness = Harness(budget=48)
    harness.add("a", prompt=LONG)
    harness.add("b", prompt=(*LONG, 1))
    plan = harness.plan()
    assert plan is not None
    harness.run(plan, [chunk.request_id for chunk in plan.chunks])
    harness.drain()
    assert harness.finish_reasons == {"a": [FinishReason.ERROR], "b": [FinishReason.LENGTH]}
    assert harness.num_cached["b"] == 0
    assert harness.tokens["b"] == harness.expected_tokens("b")


def test_a_conversation_goes_on_where_it_was() -> None:
    harness = Harness(budget=64)
    harness.add("first", prompt=LONG, max_tokens=9)
    harness.drain()
    harness.add("second", prompt=(*harness.token_ids("first"), 7))
    harness.drain()
    # All that was computed, in whole blocks: the last output token never was.
    assert harness.num_cached["second"] == 48


def test_a_preempted_request_comes_back_through_the_cache() -> None:
    harness = Harness(
        budget=64, num_blocks=12, block_size=4, max_model_len=40, admission_optimism=1.0
    )
    harness.add("old", 12, max_tokens=20)
    harness.add("new", 12, max_tokens=20)
    harness.drain()
    assert harness.scheduler.stats.num_preemptions == 1
    resumed = next(
        chunk
        for plan in harness.plans
        for chunk in plan.chunks
        if chunk.request_id == "new" and chunk.start and chunk.num_tokens > 1
    )
    assert resumed.start >= 12
    assert harness.num_cached["new"] == 0, "what it computed itself was not a hit"
    assert harness.tokens["new"] == harness.expected_tokens("new")


def test_longest_prefix_match_serves_what_is_cached_first() -> None:
    harness = Harness(budget=16, max_num_seqs=1, prefill_order="lpm")
    harness.add("first", prompt=LONG, max_tokens=1)
    harness.drain()
    harness.add("cold", 40, max_tokens=1)
    harness.add("warm", prompt=(*LONG, 1), max_tokens=1)
    harness.drain()
    assert [set(step) for step in schedule(harness)[3:]] == [{"warm"}, *[{"cold"}] * 3]


def test_longest_prefix_match_hears_of_what_comes_to_be_cached() -> None:
    """When they arrive, the cache has nothing of any of them."""
    harness = Harness(budget=64, max_num_seqs=1, prefill_order="lpm", max_model_len=64)
    harness.add("first", prompt=LONG, max_tokens=10)
    for i in range(3):
        harness.add(f"cold {i}", 40, max_tokens=1)
    harness.add("warm", prompt=(*LONG, 1), max_tokens=1)
    harness.drain()
    order = list(dict.fromkeys(i for step in schedule(harness) for i in step))
    assert order == ["first", "warm", "cold 0", "cold 1", "cold 2"]


def test_planning_looks_up_few_waiting_prompts() -> None:
    """Counts the look-ups of ten plans, with 50 waiting requests and with 5,000."""

    def looked_up(num_waiting: int) -> int:
        harness = Harness(budget=8, max_num_seqs=4, max_waiting=20_000, prefill_order="lpm")
        for i in range(num_waiting):
            harness.add(str(i), 6)
        count = 0
        original = harness.kv.lookup.match

        def counting(request: Any) -> Any:
            nonlocal count
            count += 1
            return original(request)

        harness.kv.lookup.match = counting  # type: ignore[method-assign]
        for _ in range(10):
            harness.step()
        return count

    assert looked_up(5000) <= looked_up(50)


@pytest.mark.endurance
@given(seed=st.integers(0, 2**32))
@settings(max_examples=5)
def test_many_random_operations(seed: int) -> None:
    """Adds, aborts, steps and failed ones, in one cache that is always too small."""
    choose = random.Random(seed)
    harness = Harness(
        budget=choose.randint(1, 40),
        max_num_seqs=choose.randint(2, 8),
        num_blocks=choose.randint(9, 30),
        num_host_slots=choose.choice((0, 3, 30)),
        block_size=4,
        max_model_len=32,
        max_waiting=10,
        policy=choose.choice(sorted(POLICIES)),
        prefill_order=choose.choice(sorted(ORDERS)),
    )
    for i in range(NUM_OPERATIONS):
        _operate(harness, choose, str(i))
        check_blocks(harness.kv)
    harness.drain()
    for request_id in harness.added:
        assert len(harness.finish_reasons[request_id]) == 1
        got, expected = harness.tokens[request_id], harness.expected_tokens(request_id)
        assert got == expected[: len(got)]
        harness.check_skipped(request_id)
    assert harness.scheduler.stats.num_prefix_cache_hits


def _operate(harness: Harness, choose: random.Random, request_id: str) -> None:
    recent = list(harness.added)[-12:]
    match choose.choices(("add", "continue", "abort", "crash", "step"), (30, 15, 8, 2, 45))[0]:
        case "add":
            fork, tail = choose.choice((0, 4, 10, 16, 31)), choose.randrange(1, 4)
            length = choose.randint(1, 31)
            prompt = [0 if i < fork else tail for i in range(length)]
            _add(harness, choose, request_id, prompt)
        case "continue" if recent:
            past = harness.token_ids(choose.choice(recent))
            _add(harness, choose, request_id, [*past, 5][:31])
        case "abort" if recent:
            harness.abort(choose.choice(recent))
        case "crash":
            plan = harness.plan()
            if plan is not None:
                harness.run(plan, [chunk.request_id for chunk in plan.chunks])
        case _:
            plan = harness.plan()
            if plan is not None:
                if choose.random() < 0.1:
                    harness.abort(choose.choice(recent))
                harness.run(plan)


def _add(harness: Harness, choose: random.Random, request_id: str, prompt: list[int]) -> None:
    harness.add(
        request_id,
        prompt=prompt,
        max_tokens=choose.choice((1, 2, 8, 20)),
        prompt_logprobs=choose.choice((None, None, None, None, 0)),
        cache_salt=choose.choice((None, None, None, None, "a")),
        slo_class=choose.choice(("interactive", "batch")),
    )
