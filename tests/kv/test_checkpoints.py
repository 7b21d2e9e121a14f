"""Kept states: where requests begin, which slots are theirs, and what is evicted."""

import pytest

from legato.core.plan import STATES, ChunkResult
from legato.core.request import Request
from legato.core.step_record import ShortHit
from legato.kv.checkpoints import Checkpoints, StateCheckpoint
from legato.kv.manager import KVCacheManager
from legato.kv.prefix_node import Way
from legato.kv.state_slots import CheckpointEnds
from tests.kv.cache_watcher import Routers
from tests.kv.conservation import check_blocks
from tests.kv.recurrent import landed, manager, num_hit, planned
from tests.kv.requests import request_for


def compute(kv: KVCacheManager, request: Request, *ends: int) -> None:
    for end in ends:
        landed(kv, request, planned(kv, request, end))


def begun(
    kv: KVCacheManager, name: str, prompt: list[int], cache_salt: str | None = None
) -> Request:
    request = request_for(name, prompt, cache_salt=cache_salt)
    assert kv.reserve(request)
    request.catch_up(kv.num_computed_tokens(request))
    return request


def test_ends_are_multiples_the_end_of_a_cached_path_and_before_the_last_token() -> None:
    ends = CheckpointEnds(Way([], 128, 300), 900, unit=64, spacing=256)
    found, at = [], 0
    while at < 900:
        at = ends.after(at)
        found.append(at)
    assert found == [256, 512, 768, 896, 1024]
    ends.add(640)
    assert ends.after(512) == 640
    assert 640 in ends
    assert 704 not in ends
    near = CheckpointEnds(Way([], 240), 270, unit=64, spacing=256)
    assert near.after(240) == 512, "256 is too near for a chunk of its own"
    assert 256 in near
    sent = CheckpointEnds(Way([], 240), 270, unit=64, spacing=256, needed=256)
    assert [sent.after(240), sent.after(256)] == [256, 512]


def test_a_hit_ends_at_a_checkpoint() -> None:
    kv = manager()
    prompt = list(range(15))
    request = begun(kv, "a", prompt)
    compute(kv, request, 3, 6, 8, 10, 12, 15)
    # 8 is a multiple of the spacing, and 12 the last end; 6 and 10 were given up again.
    assert [num_hit(kv, prompt[:end]) for end in (14, 12, 10, 8, 6)] == [12, 12, 8, 8, 0]
    short = kv.lookup.short_hit(kv.lookup.match(request_for("b", [*prompt[:10], 99])))
    assert short == ShortHit(8, 10, "checkpoint")
    kv.release(request)
    check_blocks(kv)


def test_a_stream_keeps_its_state_at_the_end_of_its_last_block() -> None:
    kv = manager()
    prompt = list(range(5))
    request = begun(kv, "a", prompt)
    compute(kv, request, 4, 5)
    for token_id in range(50, 57):
        request.append(token_id, 0.0)
        assert kv.reserve(request)
        compute(kv, request, request.num_tokens)
    kv.release(request)
    tokens = list(request.token_ids)
    assert [num_hit(kv, tokens[:end]) for end in (12, 11, 8, 7)] == [12, 8, 8, 4]


def test_checkpoints_leave_with_their_blocks() -> None:
    kv = manager(num_blocks=9)
    request = begun(kv, "a", list(range(15)))
    compute(kv, request, 8, 12, 15)
    kv.release(request)
    assert kv.num_checkpoints == 2
    other = begun(kv, "b", list(range(100, 107)))
    assert num_hit(kv, list(range(15))) == 8
    kv.release(other)
    kv.forget()
    assert not kv.num_checkpoints
    check_blocks(kv)


def test_a_router_is_told_of_no_block_after_the_last_checkpoint() -> None:
    kv, routers = manager(), Routers()
    kv.watch()
    prompt = list(range(15))
    request = begun(kv, "a", prompt)

    def told() -> list[int]:
        routers.take(kv.take_events())
        return sorted(len(tokens) for _, tokens in routers.other.prompts())

    compute(kv, request, 7)
    assert told() == [], "six of its tokens are cached, and no prompt can begin after them"
    compute(kv, request, 8)
    assert told() == [2, 4, 6, 8]
    compute(kv, request, 10)
    assert told() == [2, 4, 6, 8, 10], "the state rolls"
    compute(kv, request, 12, 15)
    kv.release(request)
    assert told() == [2, 4, 6, 8, 10, 12]
    [node] = kv.lookup.match(request_for("b", prompt)).nodes
    assert kv.states is not None
    kv.states.forget([node.places[5]])
    assert told() == [2, 4, 6, 8], "its blocks are cached, but the one checkpoint is gone"


def test_states_go_to_the_host_and_come_back() -> None:
    kv = manager(num_requests=1, depth=1, num_spare_slots=0, num_host_states=2)
    prompt = list(range(9))
    request = begun(kv, "a", prompt)
    compute(kv, request, 8)
    [kept] = kv.states.checkpoints.slots.values()
    compute(kv, request, 9)
    kv.release(request)
    other = begun(kv, "b", list(range(100, 109)))
    compute(kv, other, 8, 9)
    kv.release(other)
    [out] = kv.take_moves()
    assert (out.block_id, out.to_host, out.group) == (kept, True, STATES)
    assert num_hit(kv, prompt) == 8
    assert kv.num_checkpoints == 2
    again = begun(kv, "c", prompt)
    assert again.num_computed_tokens == 8
    *_, back = kv.take_moves()
    assert (back.slot, back.to_host, back.group) == (out.slot, False, STATES)
    assert planned(kv, again, 9).state.source == back.block_id
    check_blocks(kv)


def test_states_follow_their_blocks_to_the_host() -> None:
    kv = manager(num_blocks=5, num_host_slots=8)
    prompt = list(range(9))
    request = begun(kv, "a", prompt)
    compute(kv, request, 8, 9)
    kv.release(request)
    other = begun(kv, "b", list(range(100, 109)))  # takes all blocks
    check_blocks(kv)
    kv.release(other)
    assert num_hit(kv, prompt) == 8
    assert begun(kv, "c", prompt).num_computed_tokens == 8
    check_blocks(kv)


def test_salts_keep_states_apart() -> None:
    kv = manager()
    prompt = list(range(9))
    request = begun(kv, "a", prompt, cache_salt="a")
    compute(kv, request, 8, 9)
    assert num_hit(kv, prompt, "a") == 8
    assert num_hit(kv, prompt, "b") == num_hit(kv, prompt) == 0
    other = begun(kv, "b", prompt)
    assert not kv.leads(planned(kv, request, 9), request, other)


def test_a_step_that_does_not_count_leaves_source_and_checkpoint() -> None:
    kv = manager()
    prompt = list(range(13))
    request = begun(kv, "a", prompt)
    compute(kv, request, 8)
    chunk = planned(kv, request, 12)
    assert kv.landed(chunk, None) is None
    kv.end_step()
    request.settle()
    again = planned(kv, request, 12)
    assert again.state == chunk.state
    assert kv.landed(again, ChunkResult(3)) == ChunkResult(0)
    kv.end_step()
    request.settle()
    kv.commit(request)
    assert num_hit(kv, prompt) == 8
    check_blocks(kv)


def test_a_request_in_flight_does_not_jump() -> None:
    kv = manager()
    prompt = list(range(13))
    first, second = begun(kv, "a", prompt), begun(kv, "b", prompt)
    chunk = planned(kv, second, 4)
    compute(kv, first, 8)
    assert kv.find_again(second) == 0
    landed(kv, second, chunk)
    assert kv.find_again(second) == 8
    second.catch_up(8)
    assert kv.block_ids(second)[:4] == kv.block_ids(first)[:4]
    check_blocks(kv)
    compute(kv, second, 12, 13)
    check_blocks(kv)


def no_slot() -> int:
    raise AssertionError("nothing is in host memory")


@pytest.mark.parametrize("used", [None, 1])
def test_what_saves_least_goes_first_unless_it_was_used_lately(used: int | None) -> None:
    kept = Checkpoints()
    for key, num_saved in ((1, 100), (2, 300), (3, 200)):
        checkpoint = StateCheckpoint(key, slot=10 * key, num_saved_tokens=num_saved)
        kept.add(checkpoint)
        kept.let_go(checkpoint)
    in_use = kept.use(2, no_slot)
    if used is None:
        assert [kept.evict(), kept.evict()] == [10, 30]
    else:
        assert kept.evict() == 10
        kept.let_go(in_use)  # its value is now above that of the one that went
        new = StateCheckpoint(4, slot=40, num_saved_tokens=250)
        kept.add(new)
        kept.let_go(new)
        assert [kept.evict(), kept.evict(), kept.evict()] == [30, 40, 20]
    assert len(kept) == (used is None)


def test_stale_entries_do_not_pile_up() -> None:
    kept = Checkpoints()
    checkpoint = StateCheckpoint(1, slot=5, num_saved_tokens=1)
    kept.add(checkpoint)
    kept.let_go(checkpoint)
    for _ in range(1000):
        kept.let_go(kept.use(1, no_slot))
    assert len(kept._least) < 100
    assert kept.drop(checkpoint) is None, "others have begun there"
    assert kept.evict() == 5
