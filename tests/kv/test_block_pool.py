import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from legato.kv.block_pool import BlockPool, runs_of
from tests.profiles import examples

NUM_BLOCKS = 40


class BlockPoolMachine(RuleBasedStateMachine):
    """Blocks are conserved and never handed out twice, in any order of taking and giving back."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, NUM_BLOCKS + 2), after=st.none() | st.integers(0, NUM_BLOCKS - 1))
    def allocate(self, count: int, after: int | None) -> None:
        num_free, free, widest = self.pool.num_free, self.free_blocks(), self.widest_gap()
        block_ids = self.pool.allocate(count, after=after)
        if count > num_free:
            assert block_ids is None
            assert self.pool.num_free == num_free
            return
        assert block_ids is not None
        assert len(block_ids) == count
        if count and (after is None or after + 1 not in free):
            width, start = widest
            assert block_ids[0] == start + max(0, width - count) // 2
        self.held.append(block_ids)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.held:
            index = data.draw(st.integers(0, len(self.held) - 1))
            self.pool.free(self.held.pop(index))

    @rule(data=st.data())
    def free_part(self, data: st.DataObject) -> None:
        if self.held and self.held[-1]:
            kept = data.draw(st.integers(0, len(self.held[-1])))
            self.pool.free(self.held[-1][kept:])
            del self.held[-1][kept:]

    @rule(data=st.data())
    def double_free_is_refused(self, data: st.DataObject) -> None:
        free = sorted(self.free_blocks())
        if free:
            with pytest.raises(ValueError, match="free"):
                self.pool.free([data.draw(st.sampled_from(free))])

    def free_blocks(self) -> set[int]:
        return {*range(NUM_BLOCKS)} - {b for block_ids in self.held for b in block_ids}

    def widest_gap(self) -> tuple[int, int]:
        """Width and start of the widest run of free blocks, the last of them."""
        runs = runs_of(sorted(self.free_blocks()))
        return max(((end - start, start) for start, end in runs), default=(0, 0))

    @invariant()
    def conserved(self) -> None:
        taken = [b for block_ids in self.held for b in block_ids]
        assert len(taken) == len(set(taken))
        assert all(0 <= b < NUM_BLOCKS for b in taken)
        assert len(taken) + self.pool.num_free == NUM_BLOCKS


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = examples(100, stateful_step_count=50)


def test_everything_freed_is_one_run_again() -> None:
    pool = BlockPool(64)
    held = [pool.allocate(3) for _ in range(20)]
    for block_ids in held[::2] + held[1::2]:
        assert block_ids is not None
        pool.free(block_ids)
    whole = pool.allocate(64)
    assert whole == list(range(64))


@given(st.lists(st.integers(0, 30), unique=True))
def test_runs_cover_the_blocks_in_order(block_ids: list[int]) -> None:
    runs = list(runs_of(block_ids))
    assert [b for start, end in runs for b in range(start, end)] == block_ids
    assert all(left[1] != right[0] for left, right in itertools.pairwise(runs))
