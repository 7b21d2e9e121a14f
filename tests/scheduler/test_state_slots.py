"""Slots of recurrent states: which a step reads and writes, and where its chunks end."""

import pytest

from legato.core.plan import FIRST_STATE, ZERO_STATE, ChunkResult, ScheduledChunk, StateChange
from legato.kv.manager import KVCacheManager
from legato.kv.state_slots import StateSlots
from tests.scheduler.harness import Harness


def chunk(request_id: str = "a", num_tokens: int = 4) -> ScheduledChunk:
    return ScheduledChunk(request_id, 0, num_tokens, (), 0, "prefill")


def change(slots: StateSlots) -> StateChange | None:
    [assigned] = slots.assigned([chunk()])
    return assigned.state


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_in_flight_follow_each_other_around_a_ring(depth: int) -> None:
    slots = StateSlots(2, depth)
    slots.begin("a")
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
    slots.begin("a")
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


def test_a_cache_cannot_share_blocks_without_states() -> None:
    with pytest.raises(AssertionError, match="cannot be shared"):
        KVCacheManager(8, 4, states=StateSlots(1, 1))


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
        num_state_requests=2,
    )
    harness.add("a", 600, max_tokens=1)
    harness.drain()
    found = [plan.chunks[0].end for plan in harness.plans]
    assert found[: len(ends)] == ends
    assert harness.tokens["a"] == harness.expected_tokens("a")
