"""Prompts that begin where another request's recurrent state was kept."""

from typing import Any

import pytest

from legato.core.step_record import ShortHit
from legato.kv.state_slots import StateSlots
from tests.kv.conservation import check_blocks
from tests.scheduler.harness import Harness

COMMON = list(range(1000, 1040))
"""The beginning of several prompts."""


def make_harness(
    depth: int = 1,
    *,
    budget: int = 32,
    num_checkpoints: int = 20,
    num_blocks: int = 200,
    **settings: Any,
) -> Harness:
    return Harness(
        depth=depth,
        budget=budget,
        num_blocks=num_blocks,
        states=StateSlots(4, depth, num_spare_slots=num_checkpoints, unit=8, spacing=32),
        admission_optimism=1.0,
        **settings,
    )


def end(harness: Harness) -> None:
    """Let all requests end; they get what they would get alone."""
    harness.drain()
    for request_id in harness.added:
        assert harness.tokens[request_id] == harness.expected_tokens(request_id)
        harness.check_skipped(request_id)
    kv = harness.kv
    assert kv.states is not None
    harness.shadow.check_shared(kv._tree.root, kv.states.checkpoints.slots)
    check_blocks(kv)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_turn_begins_where_the_turn_before_ended(depth: int) -> None:
    harness = make_harness(depth)
    harness.add("0", prompt=COMMON[:30], max_tokens=12)
    end(harness)
    for turn in range(1, 4):
        before = harness.token_ids(str(turn - 1))
        harness.add(str(turn), prompt=[*before, *range(5)], max_tokens=12)
        end(harness)
        assert harness.num_cached[str(turn)] == (len(before) - 1) // 4 * 4


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_equal_prompts_that_arrive_together_are_computed_once(depth: int) -> None:
    harness = make_harness(depth)
    prompt = [*COMMON, *range(20)]
    for name in "abc":
        harness.add(name, prompt=prompt)
    end(harness)
    assert [harness.num_cached[name] for name in "abc"] == [0, 56, 56]


def test_a_prompt_keeps_the_state_where_it_leaves_a_cached_path() -> None:
    harness = make_harness()
    for i, name in enumerate("abc"):
        harness.add(name, prompt=[*COMMON, *[i] * 20])
        end(harness)
    assert [harness.num_cached[name] for name in "abc"] == [0, 32, 40]
    short_hits = {name: hit for plan in harness.plans for name, hit in plan.short_hits.items()}
    assert short_hits == {"b": ShortHit(32, 40, "checkpoint")}
    assert harness.scheduler.stats.num_prefix_cache_short == 8


def test_a_prompt_keeps_the_state_where_another_that_waits_leaves_it() -> None:
    harness = make_harness(budget=20, prefill_order="fcfs")
    harness.add("a", prompt=[*COMMON, *range(60)])
    harness.add("b", prompt=[*COMMON, *range(100, 120)])
    end(harness)
    ends = [chunk.end for plan in harness.plans for chunk in plan.chunks if chunk.request_id == "a"]
    assert ends[:3] == [20, 32, 40]
    assert harness.num_cached["b"] == 40


def test_a_preempted_stream_goes_on_after_a_checkpoint() -> None:
    harness = make_harness(num_blocks=20)
    for name in "ab":
        harness.add(name, 20, max_tokens=40)
    end(harness)
    [preempted] = [name for plan in harness.plans for name in plan.preempted]
    again = [chunk for plan in harness.plans for chunk in plan.chunks if chunk.kind == "prefill"]
    assert again[-1].request_id == preempted
    starts = [chunk.start for chunk in again if chunk.request_id == preempted]
    assert starts.count(0) == 1


def test_an_aborted_prompt_leaves_what_it_has_computed() -> None:
    harness = make_harness(budget=12)
    harness.add("a", prompt=[*COMMON, 1])
    for _ in range(2):
        harness.step()
    harness.abort("a")
    harness.drain()
    harness.add("b", prompt=[*COMMON, 2])
    harness.drain()
    assert harness.num_cached["b"] == 24
    assert harness.tokens["b"] == harness.expected_tokens("b")


def test_what_is_forgotten_is_computed_again() -> None:
    harness = make_harness()
    for name in "ab":
        harness.add(name, prompt=COMMON)
        end(harness)
        harness.kv.forget()
    assert harness.num_cached["b"] == 0
    assert not harness.kv.num_checkpoints


def test_requests_take_the_slots_of_checkpoints_when_they_need_them() -> None:
    harness = make_harness(num_checkpoints=0)
    for i in range(12):
        harness.add(str(i), prompt=[i, *COMMON], max_tokens=8)
    end(harness)
    assert 0 < harness.kv.num_checkpoints <= 8, "in the slots that four requests left"
