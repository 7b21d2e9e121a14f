"""The events of a cache, once a client watches."""

from legato.core.block_hash import block_hashes
from legato.core.kv_events import AllBlocksCleared, BlockStored
from legato.kv.manager import KVCacheManager
from tests.kv.requests import request_for

SIZE = 4
PROMPT = [*range(100, 113)]
NAMES = block_hashes(PROMPT, SIZE)


def test_each_event_is_told_once() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=SIZE)
    kv.watch()
    assert kv.take_events() == [AllBlocksCleared()]
    assert kv.take_events() == []


def test_what_becomes_computed_at_a_stroke_is_told_from_its_beginning_on() -> None:
    """Where two prompts part, too: who hears of a block has heard of the one before it."""
    kv = KVCacheManager(num_blocks=16, block_size=SIZE)
    kv.watch()
    first, second = request_for("a", PROMPT), request_for("b", [*PROMPT[:8], 1, 2, 3, 4, 5])
    assert kv.reserve(first)
    assert kv.reserve(second)
    kv.take_events()
    first.num_computed_tokens = len(PROMPT)
    kv.commit(first)
    told = [event for event in kv.take_events() if isinstance(event, BlockStored)]
    assert [name for event in told for name in event.block_hashes] == NAMES
    assert [event.parent_block_hash for event in told] == [None, NAMES[1]]


def test_a_full_cache_is_told_in_pieces() -> None:
    """A front door that attaches must not hold up a step: 29,000 blocks would take 0.4 s."""
    kv = KVCacheManager(num_blocks=3000, block_size=SIZE)
    prompts = [[first, *range(1000, 1000 + 4 * length)] for first, length in enumerate([2000, 900])]
    for first, prompt in enumerate(prompts):
        request = request_for(str(first), prompt)
        assert kv.reserve(request)
        request.num_computed_tokens = len(prompt)
        kv.commit(request)
        kv.release(request)
    kv.watch()
    told, others = [], 0
    while kv.has_untold_blocks:
        events = [event for event in kv.take_events() if isinstance(event, BlockStored)]
        hashes = [name for event in events for name in event.block_hashes]
        assert len(hashes) <= 128 + len(NAMES)
        told += hashes
        if others == 0:
            late = request_for("late", PROMPT)
            assert kv.reserve(late)
            late.num_computed_tokens = len(PROMPT)
            kv.commit(late)
        others += 1
    assert others > 2900 / 128
    assert len(set(told)) == len(told)
    assert set(told) == {name for p in [*prompts, PROMPT] for name in block_hashes(p, SIZE)}
