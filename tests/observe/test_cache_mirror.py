"""What routers of other projects hear of a cache that has ends of hits, and of one that has none.

`tests/kv/test_checkpoint_machine.py` plays a real cache.
"""

import msgspec

from legato.core.kv_events import AllBlocksCleared, BlockRemoved, HitEnds
from legato.observe.cache_mirror import CacheMirror
from tests.observe.cached_prompt import NAMES, stored


def test_a_mirror_tells_each_block_after_the_one_before_it() -> None:
    mirror = CacheMirror()
    host = [stored(i, i + 1, "CPU") for i in range(3)]
    on_device = BlockRemoved(block_hashes=NAMES)
    # From the last on, as blocks are evicted.
    for event in (stored(0, 1), stored(1, 3), host[2], host[1], host[0], on_device):
        assert mirror.note(event) == [event]
    assert list(mirror.snapshot()) == [AllBlocksCleared(), *host]
    mirror.note(AllBlocksCleared())
    assert list(mirror.snapshot()) == [AllBlocksCleared()]


def test_blocks_are_published_up_to_the_last_end() -> None:
    mirror = CacheMirror()
    for event in (HitEnds(), stored()):
        assert mirror.note(event) == []
    assert mirror.note(HitEnds(added=[NAMES[0]])) == [stored(0, 1)]
    assert mirror.note(HitEnds(added=[NAMES[2]])) == [stored(1, 3)]
    assert mirror.note(HitEnds(removed=[NAMES[0]])) == [], "it is on the way to another end"
    assert list(mirror.snapshot()) == [AllBlocksCleared(), *(stored(i, i + 1) for i in range(3))]
    assert mirror.note(HitEnds(removed=[NAMES[2]])) == [BlockRemoved(block_hashes=NAMES[::-1])]
    assert mirror.note(BlockRemoved(block_hashes=[NAMES[2]])) == []
    assert list(mirror.snapshot()) == [AllBlocksCleared()]


def test_an_end_that_rolls_on_removes_nothing() -> None:
    mirror = CacheMirror()
    for event in (HitEnds(), stored(0, 2), HitEnds(added=[NAMES[1]]), stored(2, 3)):
        mirror.note(event)
    assert mirror.note(HitEnds(added=[NAMES[2]], removed=[NAMES[1]])) == [stored(2, 3)]


def test_published_blocks_move_to_the_host_and_leave_it() -> None:
    mirror = CacheMirror()
    for event in (HitEnds(), stored(), HitEnds(added=[NAMES[1]])):
        mirror.note(event)
    assert mirror.note(BlockRemoved(block_hashes=NAMES[:0:-1])) == [
        BlockRemoved(block_hashes=[NAMES[1]])
    ]
    assert mirror.note(stored(1, 3, "CPU")) == [stored(1, 2, "CPU")]
    assert mirror.note(HitEnds(removed=[NAMES[1]])) == [
        BlockRemoved(block_hashes=[NAMES[0]], medium="GPU"),
        BlockRemoved(block_hashes=[NAMES[1]], medium="CPU"),
    ]


def test_after_all_is_cleared_hits_end_anywhere_until_it_says_otherwise() -> None:
    mirror = CacheMirror()
    mirror.note(HitEnds())
    mirror.note(AllBlocksCleared())
    assert mirror.note(stored()) == [stored()]


def test_no_event_that_is_published_is_unknown_to_vllm() -> None:
    mirror = CacheMirror()
    events = [AllBlocksCleared(), HitEnds(), stored(), HitEnds(added=NAMES)]
    told = [event for one in events for event in mirror.note(one)]
    kinds = {msgspec.to_builtins(event)["type"] for event in told}
    assert kinds == {"AllBlocksCleared", "BlockStored"}
