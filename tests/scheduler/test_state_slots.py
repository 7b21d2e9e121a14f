"""Slots of recurrent states: which a step reads and writes, and where its chunks end."""

import pytest

from legato.core.plan import FIRST_STATE, ZERO_STATE, ChunkResult, ScheduledChunk, StateChange
from legato.kv.manager import KVCacheManager
from legato.kv.prefix_node import Way
from legato.kv.state_slots import StateSlots
from tests.scheduler.harness import Harness


def chunk(request_id: str = "a", num_tokens: int = 4) -> ScheduledChunk:
    return ScheduledChunk(request_id, 0, num_tokens, (), 0, "prefill")


def begin(slots: StateSlots) -> None:
    slots.begin("a", slots.ends(Way([], 0), 100))


def change(slots: StateSlots) -> StateChange | None:
    [assigned] = slots.assigned([chunk()])
    return assigned.state


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_in_flight_follow_each_other_from_slot_to_slot(depth: int) -> None:
    slots = StateSlots(2, depth)
    begin(slots)
    changes = [change(slots) for _ in range(depth)]
    expected = [ZERO_STATE, *range(FIRST_STATE, FIRST_STATE + depth + 1)]
    for _ in range(5):
        assert slots.land(chunk(), ChunkResult(4)) == ChunkResult(4)
        changes.append(change(slots))
    sources = [c.source for c in changes if c is not None]
    destinations = [c.destination for c in changes if c is not None]
    assert sources[0] == expected[0]
    assert sources[1:] == destinations[:-1]
    assert len(set(destinations)) == depth + 1
    assert all(c.source != c.destination for c in changes if c is not None)


def test_what_does_not_count_leaves_the_source_as_it_is() -> None:
    slots = StateSlots(1, 2)
    begin(slots)
    first = change(slots)
    assert slots.land(chunk(), None) is None
    assert change(slots) == first
    partly = slots.land(chunk(), ChunkResult(3, is_complete=True))
    assert partly == ChunkResult(0, is_complete=True)
    assert change(slots) == first
    later = change(slots)
    slots.withdraw([chunk()])
    assert change(slots) == later
    slots.release("a")
    slots.withdraw([chunk()])  # of a request that has ended
    assert slots.num_free == 1


@pytest.mark.parametrize(
    ("budget", "ends"),
    [(7, [7, 14, 21]), (64, [64, 128, 192]), (100, [100, 192, 292]), (300, [256, 512, 600])],
)
def test_chunks_end_at_multiples_of_64_where_that_costs_little(
    budget: int, ends: list[int]
) -> None:
    harness = Harness(
        budget=budget,
        num_blocks=200,
        max_model_len=700,
        enable_prefix_caching=False,
        states=StateSlots(2, 1),
    )
    harness.add("a", 600, max_tokens=1)
    harness.drain()
    found = [plan.chunks[0].end for plan in harness.plans]
    assert found[: len(ends)] == ends
    assert harness.tokens["a"] == harness.expected_tokens("a")


@pytest.mark.parametrize(
    ("prompt_len", "budget", "ends"),
    [
        (600, 1000, [256, 512, 576, 600]),
        (600, 200, [192, 256, 448, 512, 576, 600]),
        (576, 1000, [256, 512, 576]),
        (65, 1000, [64, 65]),
        (64, 1000, [64]),
    ],
)
def test_with_a_prefix_cache_chunks_end_at_checkpoints(
    prompt_len: int, budget: int, ends: list[int]
) -> None:
    harness = Harness(
        budget=budget, num_blocks=200, max_model_len=700, states=StateSlots(2, 1, spacing=256)
    )
    harness.add("a", prompt_len, max_tokens=1)
    harness.drain()
    chunks = [plan.chunks[0] for plan in harness.plans]
    assert [chunk.end for chunk in chunks] == ends
    assert chunks[-1].ended_by == "prompt_end"
    bound = {chunk.end for chunk in chunks if chunk.ended_by == "checkpoint"}
    assert bound == {
        end for end in ends[:-1] if not end % 256 or end == (prompt_len - 1) // 64 * 64
    }
    assert harness.tokens["a"] == harness.expected_tokens("a")


def test_whole_prompts_are_not_cut_for_checkpoints() -> None:
    harness = Harness(
        budget=800,
        num_blocks=200,
        max_model_len=700,
        enable_chunked_prefill=False,
        states=StateSlots(2, 1, spacing=256),
    )
    harness.add("a", 600, max_tokens=9)
    harness.drain()
    assert harness.plans[0].chunks[0].num_tokens == 600
    harness.add("b", prompt=[*harness.token_ids("a"), 1])
    harness.drain()
    assert harness.num_cached["b"] == 608, "its last block while it decoded"


@pytest.mark.parametrize(("is_sharing", "block_size"), [(False, 4), (True, 8)])
def test_slots_keep_states_only_at_ends_of_shared_blocks(is_sharing: bool, block_size: int) -> None:
    states = StateSlots(1, 1, block_size=block_size, unit=8, spacing=8)
    with pytest.raises(AssertionError, match="states"):
        KVCacheManager(16, 4, enable_prefix_caching=is_sharing, states=states)
