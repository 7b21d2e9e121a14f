"""Blocks of layers with sliding windows: which a request has, a hit needs, and a need counts."""

import pytest

from legato.core.errors import ConfigError
from legato.core.kv_events import HitEnds
from legato.core.request import Request
from legato.kv.block_ids import BlockIds, block_array
from legato.kv.manager import KVCacheManager
from legato.kv.window_group import WindowGroup
from legato.kv.window_groups import WindowGroups
from legato.kv.window_need import WindowNeed, num_windowed_requests, window_bytes
from tests.kv.cache_watcher import CacheWatcher, Routers
from tests.kv.conservation import check_blocks
from tests.kv.requests import request_for
from tests.kv.windowed import BLOCK_SIZE, MAX_REQUESTS, WINDOWS, check_ends, manager


def compute(kv: KVCacheManager, request: Request, num_tokens: int) -> None:
    assert kv.reserve_chunk(request, num_tokens)
    request.num_scheduled_tokens += num_tokens
    request.num_computed_tokens = request.num_scheduled_tokens
    kv.commit(request)


def admitted(kv: KVCacheManager, name: str, prompt: range) -> Request:
    request = request_for(name, prompt)
    assert kv.reserve(request)
    request.catch_up(kv.num_computed_tokens(request))
    return request


def test_a_request_keeps_the_blocks_that_its_next_query_reads() -> None:
    kv = manager(is_caching=False)
    request = admitted(kv, "a", range(14))
    for end in range(1, 15):
        compute(kv, request, 1)
        for window, table in zip(WINDOWS, kv.window_tables([request])[0], strict=True):
            assert len(table) == -(-end // BLOCK_SIZE)
            first = max(0, end + 1 - window) // BLOCK_SIZE
            assert table[:first].tolist() == [0] * first
            assert len(set(table[first:])) == len(table) - first
    assert [group.num_cached_blocks for group in kv.windows.groups] == [0, 0]
    kv.release(request)
    assert all(group.num_free_blocks == group.num_blocks for group in kv.windows.groups)


def test_a_request_has_room_where_all_groups_have_blocks() -> None:
    """After a preemption, a prompt may end at a block's end, and its next token stands alone."""
    kv = manager()
    request = admitted(kv, "a", range(5))
    compute(kv, request, 4)
    assert request.num_reserved_tokens == 4
    assert kv.reserve(request)
    assert request.num_reserved_tokens == 6
    assert [len(table) for table in kv.window_tables([request])[0]] == [3, 3]


def test_the_fullest_of_groups_with_one_window_tells_the_usage() -> None:
    groups = [WindowGroup(4, num_blocks, BLOCK_SIZE) for num_blocks in (8, 4, 8)]
    windows = WindowGroups(groups, block_size=BLOCK_SIZE, max_requests=1)
    windows.begin("a", block_array(), [])
    assert windows.grow("a", 2)
    assert windows.usage == {4: 0.5}


def test_a_hit_is_as_long_as_all_windows_find_their_blocks() -> None:
    kv = manager()
    request = admitted(kv, "a", range(13))
    compute(kv, request, 6)
    compute(kv, request, 6)
    kv.release(request)
    again = request_for("b", range(13))
    assert kv.lookup.match(again).num_tokens == 12
    small, large = kv.windows.groups
    # Query 12 reads tokens from 9 on in the small window, and from 6 on in the large one.
    assert small.num_hit_blocks(*path(kv, again)) == 6
    [taken] = [large._cached[key] for key in path(kv, again)[0][4:5]]
    large._evict(taken)
    assert kv.lookup.match(again).num_tokens == 8, "the block of tokens 8 and 9 is gone"
    assert kv.reserve(again)
    tables = kv.window_tables([again])[0]
    assert [table.tolist().count(0) for table in tables] >= [2, 1]
    check_blocks(kv)


def path(kv: KVCacheManager, request: Request) -> tuple[BlockIds, int]:
    """Its blocks in the tree, and their number."""
    way = kv._tree.match(kv.lookup.sought(request), kv.lookup.num_shareable(request))
    keys = type(way.nodes[0].places)("i")
    for node in way.nodes:
        keys += node.places
    return keys, len(keys)


def test_what_leaves_the_tree_leaves_the_windows() -> None:
    kv = manager(num_blocks=7)
    request = admitted(kv, "a", range(13))
    for _ in range(6):
        compute(kv, request, 2)
    kv.release(request)
    assert all(group.num_cached_blocks == 6 for group in kv.windows.groups)
    other = admitted(kv, "b", range(100, 109))  # five blocks; one was free
    assert kv.lookup.match(request_for("c", range(13))).num_tokens == 4
    assert all(group.num_cached_blocks == 2 for group in kv.windows.groups)
    kv.release(other)
    check_blocks(kv)


def test_windows_blocks_go_to_the_host_and_come_back() -> None:
    kv = manager(num_blocks=7, num_host_slots=60)
    prompts = [range(100 * i, 100 * i + 13) for i in range(8)]
    for prompt in prompts:
        request = admitted(kv, str(prompt.start), prompt)
        for _ in range(6):
            compute(kv, request, 2)
        kv.release(request)
        check_blocks(kv)
    moves = kv.take_moves()
    assert {move.group for move in moves if move.to_host} == {0, 1, 2}
    assert all(move.to_host for move in moves)
    again = request_for("again", prompts[0])
    assert kv.lookup.match(again).num_tokens == 12
    assert kv.reserve(again)
    check_blocks(kv)
    num_back = [0, 0, 0]
    for move in kv.take_moves():
        num_back[move.group] += not move.to_host
    assert num_back == [6, 2, 3], "all blocks, and those that query 12 reads"


def test_routers_are_told_when_a_window_lacks_a_block() -> None:
    kv, routers = manager(), Routers()
    kv.watch()

    def told() -> tuple[list[int], list[int]]:
        """The ends of hits, and the blocks that routers of other projects know."""
        routers.take(kv.take_events())
        check_ends(kv, routers.own)
        known = sorted(len(tokens) for _, tokens in routers.other.prompts())
        return sorted(map(len, routers.own.ends())), known

    request = admitted(kv, "a", range(13))
    compute(kv, request, 6)
    compute(kv, request, 6)
    kv.release(request)
    assert told() == ([2, 4, 6, 8, 10, 12], [2, 4, 6, 8, 10, 12])
    keys, _ = path(kv, request)
    small, large = kv.windows.groups
    large._evict(large._cached[keys[4]])
    assert told() == ([2, 4, 6, 8], [2, 4, 6, 8]), "query 12 of the large window reads tokens 8, 9"
    small._evict(small._cached[keys[0]])
    assert told() == ([6, 8], [2, 4, 6, 8]), "block 0 is on the way to a hit of 8 tokens"
    again = admitted(kv, "b", range(13))
    assert again.num_computed_tokens == 8
    compute(kv, again, 5)
    assert told() == ([6, 8, 10, 12], [2, 4, 6, 8, 10, 12])


def test_ends_of_hits_stay_where_a_part_of_the_path_comes_back_from_the_host() -> None:
    kv, watcher = manager(num_blocks=7, num_host_slots=60), CacheWatcher()
    kv.watch()
    for first in (0, 100):
        request = admitted(kv, str(first), range(first, first + 13))
        compute(kv, request, 6)
        compute(kv, request, 6)
        kv.release(request)
    short = admitted(kv, "c", range(7))
    assert short.num_computed_tokens == 6
    kv.release(short)
    watcher.take(kv.take_events())
    check_ends(kv, watcher)
    group = kv.windows.groups[0]
    group._evict(group._cached[path(kv, short)[0][2]])
    [gone] = [event for event in kv.take_events() if isinstance(event, HitEnds)]
    watcher.take([gone])
    check_ends(kv, watcher)
    assert len(gone.removed) == 2, "of 6 and of 8 tokens, in host memory"


def test_blocks_passed_under_a_step_come_free_when_it_lands() -> None:
    kv = manager(is_caching=False)
    request = admitted(kv, "a", range(14))
    compute(kv, request, 5)
    kv.begin_step()
    before = [group.num_free_blocks for group in kv.windows.groups]
    compute(kv, request, 4)
    kv.release(request)
    assert all(
        a < b for a, b in zip(before, [g.num_blocks for g in kv.windows.groups], strict=True)
    )
    assert all(
        group.num_free_blocks <= b for group, b in zip(kv.windows.groups, before, strict=True)
    )
    kv.end_step()
    assert all(group.num_free_blocks == group.num_blocks for group in kv.windows.groups)


def test_empty_blocks_are_lent_and_cached_ones_are_not() -> None:
    kv = manager()
    request = admitted(kv, "a", range(13))
    compute(kv, request, 6)
    compute(kv, request, 6)
    kv.release(request)
    lent = kv.borrow(fewest=4, most=4)
    assert lent is not None
    for group, taken in zip(kv.windows.groups, lent.windows, strict=True):
        assert len(taken) + group.num_cached_blocks == group.num_blocks
        assert group.num_empty_blocks == 0
    assert kv.borrow(fewest=1, most=1) is None, "the windows have no more"
    assert kv.lookup.match(request_for("b", range(13))).num_tokens == 12
    kv.give_back(lent)
    check_blocks(kv)


def test_no_more_requests_than_the_windows_have_blocks_for() -> None:
    kv = manager(num_blocks=100)
    for i in range(MAX_REQUESTS):
        admitted(kv, str(i), range(10 * i, 10 * i + 9))
    late = request_for("late", range(50, 54))
    assert not kv.fits(late)
    assert not kv.reserve(late)


def test_memory_is_divided_so_that_the_longest_request_fits() -> None:
    need = WindowNeed.of(512, block_bytes=22, block_size=32, rows_in_flight=576, longest=1024)
    assert (need.per_request, need.per_step) == (18, 18)
    divide = {"request_bytes": 1024 * 4, "most": 64}
    assert num_windowed_requests([need], 10**6, **divide) == 64
    some = num_windowed_requests([need], 20_000, **divide)
    assert 1 < some < 64
    assert window_bytes([need], some) <= 10_000 < window_bytes([need], some + 1)
    least = window_bytes([need], 1) + 1024 * 4
    assert num_windowed_requests([need], least, **divide) == 1
    with pytest.raises(ConfigError, match=f"needs {least:,} bytes"):
        num_windowed_requests([need], least - 1, **divide)


def test_short_requests_need_no_more_than_all_their_blocks() -> None:
    need = WindowNeed.of(64, block_bytes=1, block_size=32, rows_in_flight=2112, longest=16)
    assert need.num_blocks(1) == 16
    assert need.num_blocks(64) == 64 * 4 + 66
