"""Blocks of layers with sliding windows: their requests, contents and release."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from legato.core.block_ids import BlockIds, block_array
from legato.core.errors import ConfigError
from legato.core.kv_events import HitEnds
from legato.core.request import Request
from legato.kv.handovers import Handover
from legato.kv.manager import KVCacheManager
from legato.kv.window_group import WindowGroup
from legato.kv.window_groups import WindowGroups
from legato.kv.window_need import WindowNeed, num_windowed_requests, window_bytes
from tests.kv.cache_watcher import CacheWatcher, Routers
from tests.kv.conservation import check_blocks
from tests.kv.holding import HoldingMachine
from tests.kv.requests import request_for
from tests.profiles import examples

BLOCK_SIZE = 2
WINDOWS = (4, 7)
MOST_ROWS = 6
"""Most tokens of all chunks in flight."""
MAX_REQUESTS = 3


def manager(
    num_blocks: int = 16,
    *,
    is_caching: bool = True,
    num_host_slots: int = 0,
    max_requests: int = MAX_REQUESTS,
    num_lent: int = 0,
) -> KVCacheManager:
    """Args: num_lent: for how many requests transfers may have blocks of windows."""
    needs = [
        WindowNeed.of(w, block_bytes=1, block_size=BLOCK_SIZE, rows_in_flight=MOST_ROWS, longest=99)
        for w in WINDOWS
    ]
    groups = [
        WindowGroup(
            n.window,
            n.num_blocks(max_requests + num_lent),
            BLOCK_SIZE,
            num_host_slots=num_host_slots // 2,
            num_spare=n.num_blocks(max_requests + num_lent) - n.num_blocks(max_requests),
        )
        for n in needs
    ]
    windows = WindowGroups(groups, block_size=BLOCK_SIZE, max_requests=max_requests)
    return KVCacheManager(
        num_blocks,
        BLOCK_SIZE,
        enable_prefix_caching=is_caching,
        num_host_slots=num_host_slots,
        windows=windows,
    )


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


class Flight(NamedTuple):
    """A chunk under way: what its step names."""

    request: Request
    start: int
    end: int
    tables: tuple[BlockIds, ...]


Place = tuple[dict[tuple[int, int], tuple[int, ...]], tuple[int, int]]


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=16)


class WindowsMachine(HoldingMachine):
    """Requests over few tokens in a small cache, with up to three steps in flight.

    The contents of each slot of each group are kept as all tokens up to its own, and forgotten when
    its block comes free. A step that reads other contents, or none, fails.
    """

    @initialize(
        num_host_slots=st.sampled_from([0, 6, 40]),
        max_requests=st.sampled_from([1, MAX_REQUESTS]),
        num_lent=st.sampled_from([0, 1, 3]),
    )
    def start(self, num_host_slots: int, max_requests: int, num_lent: int) -> None:
        self.kv = manager(
            num_host_slots=num_host_slots, max_requests=max_requests, num_lent=num_lent
        )
        self.served: list[list[int]] = []
        # What transfers fill, with the prompt, and what they read.
        self.received: list[tuple[Handover, tuple[int, ...]]] = []
        self.sent: list[tuple[Handover, tuple[int, ...]]] = []
        assert self.kv.windows is not None
        self.routers = Routers()
        self.windows = (None, *WINDOWS)
        self.host: dict[int, list[tuple[int, ...] | None]] = {}  # of the first group; key slot
        self.flights: deque[Flight] = deque()
        self.num_added = 0
        # Of each group; key (block, offset), value all tokens up to this one's.
        self.contents: list[dict[tuple[int, int], tuple[int, ...]]] = [{} for _ in self.windows]
        for group, contents in zip(self.kv.windows.groups, self.contents[1:], strict=True):
            free = group._pool.free

            def poisoning(
                block_ids: list[int],
                free: object = free,
                contents: dict[tuple[int, int], tuple[int, ...]] = contents,
            ) -> None:
                for block_id in block_ids:
                    for offset in range(BLOCK_SIZE):
                        contents.pop((block_id, offset), None)
                free(block_ids)  # type: ignore[operator]

            group._pool.free = poisoning  # type: ignore[method-assign]
            self.copy_at_once(group, contents)

    def copy_at_once(
        self, group: WindowGroup, contents: dict[tuple[int, int], tuple[int, ...]]
    ) -> None:
        """Make a group's copies when they are planned: afterwards a block's contents are gone."""
        host: dict[int, list[tuple[int, ...] | None]] = {}  # key slot
        spill, restore = group.spilled.spill, group.spilled.restore

        def spilling(key: int, place: int) -> int | None:
            dropped = spill(key, place)
            if key in group.spilled:
                host[group.spilled._slots[key]] = read(contents, place)
            return dropped

        def restoring(slot: int, place: int) -> None:
            restore(slot, place)
            fill(contents, place, host[slot])

        group.spilled.spill = spilling  # type: ignore[method-assign]
        group.spilled.restore = restoring  # type: ignore[method-assign]

    def move(self) -> None:
        """Make the copies of the first group, before the next step."""
        for move in self.kv.take_moves():
            if move.group == 0 and move.to_host:
                self.host[move.slot] = read(self.contents[0], move.block_id)
            elif move.group == 0:
                fill(self.contents[0], move.block_id, self.host[move.slot])

    @rule(prompt=PROMPTS)
    def begin(self, prompt: list[int]) -> None:
        self.num_added += 1
        request = request_for(str(self.num_added), prompt)
        found, fits = self.kv.lookup.match(request), self.kv.fits(request)
        assert found.num_computed_tokens == found.num_tokens < request.num_tokens
        assert self.kv.reserve(request, found) is fits
        if fits:
            self.held.append(request)
            request.catch_up(self.kv.num_computed_tokens(request))
            assert request.num_computed_tokens == found.num_tokens

    @precondition(lambda self: not self.flights)
    @rule(prompt=PROMPTS, num_tokens=st.integers(1, MOST_ROWS))
    def serve(self, prompt: list[int], num_tokens: int) -> None:
        """A request comes, is computed and ends."""
        num_held = len(self.held)
        self.begin(prompt)
        if len(self.held) > num_held:
            request = self.held[-1]
            while request.num_scheduled_tokens < request.num_tokens:
                self.plan_chunk(request, num_tokens)
                self.land()
            self.drop(request)
            self.served.append(prompt)

    @precondition(lambda self: self.held and len(self.flights) < 3)
    @rule(data=st.data(), num_tokens=st.integers(1, MOST_ROWS))
    def plan(self, data: st.DataObject, num_tokens: int) -> None:
        self.plan_chunk(data.draw(st.sampled_from(self.held)), num_tokens)

    def plan_chunk(self, request: Request, num_tokens: int) -> None:
        room = MOST_ROWS - sum(flight.end - flight.start for flight in self.flights)
        start = request.num_scheduled_tokens
        num_tokens = min(num_tokens, room, request.num_tokens - start)
        if num_tokens <= 0:
            return
        if not self.kv.reserve_chunk(request, num_tokens):
            assert self.flights, "there are blocks for every request once all steps have landed"
            return
        request.num_scheduled_tokens += num_tokens
        self.move()
        tables = self.kv.block_ids(request), *self.kv.window_tables([request])[0]
        self.flights.append(Flight(request, start, start + num_tokens, tables))
        self.kv.begin_step()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def find_again(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.held))
        if not request.is_in_flight and request.num_computed_tokens < request.num_tokens:
            before = request.num_computed_tokens
            request.catch_up(self.kv.find_again(request))
            assert request.num_computed_tokens >= before

    @precondition(lambda self: self.flights)
    @rule()
    def land(self) -> None:
        flight = self.flights.popleft()
        self.compute(flight)
        self.kv.end_step()
        if flight.request in self.held:
            flight.request.num_computed_tokens = flight.end
            self.kv.commit(flight.request)

    def compute(self, flight: Flight) -> None:
        tokens = tuple(flight.request.token_ids)
        for window, table, contents in zip(self.windows, flight.tables, self.contents, strict=True):
            for position in range(flight.start, flight.end):
                place = table[position // BLOCK_SIZE], position % BLOCK_SIZE
                contents[place] = tokens[: position + 1]
            first = 0 if window is None else max(0, flight.start + 1 - window)
            for position in range(first, flight.end):
                place = table[position // BLOCK_SIZE], position % BLOCK_SIZE
                assert contents.get(place) == tokens[: position + 1]

    @rule(data=st.data(), prompt=PROMPTS)
    def begin_transfer(self, data: st.DataObject, prompt: list[int]) -> None:
        sends = bool(self.served) and data.draw(st.booleans())
        if sends:
            self.move()  # as an engine does after each plan
            prompt = data.draw(st.sampled_from(self.served))
        request = request_for("transferred", prompt)
        handover = (self.kv.handovers.send if sends else self.kv.handovers.receive)(request)
        if handover is not None:
            (self.sent if sends else self.received).append((handover, tuple(prompt)))

    @precondition(lambda self: self.received)
    @rule(data=st.data(), is_whole=st.booleans())
    def end_receipt(self, data: st.DataObject, is_whole: bool) -> None:
        one = data.draw(st.sampled_from(self.received))
        self.received.remove(one)
        handover, prompt = one
        if is_whole:
            self.move()
            for _, place, tokens in self.places(handover, prompt, handover.num_found):
                place[0][place[1]] = tokens
            self.kv.handovers.keep(handover)
        self.kv.handovers.let_go(handover)
        if is_whole:
            assert (
                self.kv.lookup.match(request_for("?", prompt)).num_tokens
                == len(prompt[:-1]) // 2 * 2
            )

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def end_sending(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.sent))
        self.sent.remove(one)
        self.kv.handovers.let_go(one[0])

    @invariant()
    def what_is_sent_stays(self) -> None:
        for handover, prompt in getattr(self, "sent", ()):
            for _, place, tokens in self.places(handover, prompt, 0):
                assert place[0].get(place[1]) == tokens

    def places(
        self, handover: Handover, prompt: tuple[int, ...], num_found: int
    ) -> Iterator[tuple[int, "Place", tuple[int, ...]]]:
        """Of each group, where a transfer reads or writes, and what is there."""
        parts = [(handover.table.block_ids[num_found:], num_found)]
        parts += [(ids, handover.num_blocks - len(ids)) for ids in handover.windows]
        for group, (block_ids, first) in enumerate(parts):
            for i, block_id in enumerate(block_ids, first):
                for offset in range(BLOCK_SIZE):
                    tokens = prompt[: i * BLOCK_SIZE + offset + 1]
                    yield group, (self.contents[group], (block_id, offset)), tokens

    @rule()
    def forget(self) -> None:
        self.kv.forget()

    @rule()
    def watch(self) -> None:
        self.kv.watch()

    @invariant()
    def who_watches_knows_where_hits_end(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.routers.take(self.kv.take_events())
        if not self.routers.own.is_watching:
            return
        self.routers.check(self.kv)
        check_ends(self.kv, self.routers.own)

    @invariant()
    def blocks_are_conserved(self) -> None:
        if hasattr(self, "kv"):
            check_blocks(self.kv)


def check_ends(kv: KVCacheManager, watcher: CacheWatcher) -> None:
    """Of each cached path, the last end that was told is where the manager's hit ends."""
    ends = watcher.ends()
    # Otherwise no request can begin, and blocks in host memory may not come back for one.
    can_begin = kv.windows.has_place and not kv.windows._leaving
    for _, tokens in watcher.prompts():
        believed = max((len(end) for end in ends if tokens[: len(end)] == end), default=0)
        found = kv.lookup.match(request_for("?", [*tokens, -1])).num_tokens
        assert found == believed or (not can_begin and found < believed)


def read(
    contents: Mapping[tuple[int, int], tuple[int, ...]], block_id: int
) -> list[tuple[int, ...] | None]:
    return [contents.get((block_id, offset)) for offset in range(BLOCK_SIZE)]


def fill(
    contents: dict[tuple[int, int], tuple[int, ...]],
    block_id: int,
    read: Iterable[tuple[int, ...] | None],
) -> None:
    for offset, there in enumerate(read):
        if there is not None:
            contents[block_id, offset] = there


TestWindows = WindowsMachine.TestCase
TestWindows.settings = examples(100, stateful_step_count=50)
