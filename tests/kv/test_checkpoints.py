"""Kept states: where requests begin, which slots are theirs, and what is evicted."""

from collections import deque
from typing import NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from legato.core.plan import STATES, ZERO_STATE, ChunkResult, ScheduledChunk
from legato.core.request import Request
from legato.core.step_record import ShortHit
from legato.kv.checkpoints import Checkpoint, Checkpoints
from legato.kv.handovers import Handover
from legato.kv.manager import KVCacheManager
from legato.kv.prefix_node import Node, Way
from legato.kv.state_slots import CheckpointEnds, StateSlots
from tests.kv.cache_watcher import Routers, cached_ends
from tests.kv.conservation import check_blocks
from tests.kv.holding import HoldingMachine
from tests.kv.requests import request_for
from tests.profiles import examples

BLOCK_SIZE = 2
DEPTH = 3


def manager(
    num_blocks: int = 24,
    *,
    num_requests: int = 3,
    num_spare_slots: int = 8,
    spacing: int = 8,
    depth: int = DEPTH,
    num_host_states: int = 0,
    num_host_slots: int = 0,
) -> KVCacheManager:
    states = StateSlots(
        num_requests,
        depth,
        num_spare_slots=num_spare_slots,
        unit=min(4, spacing),
        spacing=spacing,
        num_host_slots=num_host_states,
    )
    return KVCacheManager(num_blocks, BLOCK_SIZE, num_host_slots=num_host_slots, states=states)


def planned(kv: KVCacheManager, request: Request, end: int) -> ScheduledChunk:
    start = request.num_scheduled_tokens
    chunk = ScheduledChunk(
        request.request_id, start, end - start, kv.block_ids(request), 0, "prefill"
    )
    request.num_scheduled_tokens = end
    [assigned] = kv.assigned([chunk])
    kv.begin_step()
    return assigned


def landed(kv: KVCacheManager, request: Request, chunk: ScheduledChunk) -> None:
    kv.end_step()
    assert kv.landed(chunk, ChunkResult(chunk.num_tokens)) is not None
    request.num_computed_tokens = chunk.end
    kv.commit(request)


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


def num_hit(kv: KVCacheManager, prompt: list[int], cache_salt: str | None = None) -> int:
    return kv.lookup.match(request_for("?", [*prompt, -1], cache_salt=cache_salt)).num_tokens


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
        checkpoint = Checkpoint(key, slot=10 * key, num_saved_tokens=num_saved)
        kept.add(checkpoint)
        kept.let_go(checkpoint)
    in_use = kept.use(2, no_slot)
    if used is None:
        assert [kept.evict(), kept.evict()] == [10, 30]
    else:
        assert kept.evict() == 10
        kept.let_go(in_use)  # its value is now above that of the one that went
        new = Checkpoint(4, slot=40, num_saved_tokens=250)
        kept.add(new)
        kept.let_go(new)
        assert [kept.evict(), kept.evict(), kept.evict()] == [30, 40, 20]
    assert len(kept) == (used is None)


def test_stale_entries_do_not_pile_up() -> None:
    kept = Checkpoints()
    checkpoint = Checkpoint(1, slot=5, num_saved_tokens=1)
    kept.add(checkpoint)
    kept.let_go(checkpoint)
    for _ in range(1000):
        kept.let_go(kept.use(1, no_slot))
    assert len(kept._least) < 100
    assert kept.drop(checkpoint) is None, "others have begun there"
    assert kept.evict() == 5


def prompts() -> st.SearchStrategy[list[int]]:
    """Prompts that begin alike, up to any token."""
    return st.builds(
        lambda length, fork, tail: [0 if i < fork else tail for i in range(length)],
        st.integers(5, 20) | st.integers(1, 20),
        st.integers(0, 20),
        st.integers(1, 3),
    )


class Flight(NamedTuple):
    request: Request
    chunk: ScheduledChunk


class CheckpointsMachine(HoldingMachine):
    """Requests over few tokens in a small cache, with up to three steps in flight.

    The contents of each slot are kept as all tokens up to its state. With swap space, one step is
    in flight at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.depth = DEPTH
        self.host: dict[int, tuple[int, ...] | None] = {}
        self.flights: deque[Flight] = deque()
        self.num_added = 0
        self.contents: dict[int, tuple[int, ...] | None] = {ZERO_STATE: ()}
        self.routers = Routers()

    @initialize(
        num_requests=st.sampled_from([1, 2]),
        spacing=st.sampled_from([BLOCK_SIZE, 8]),
        num_host_states=st.sampled_from([0, 0, 1, 12]),
        num_host_slots=st.sampled_from([0, 5, 40]),
        num_blocks=st.sampled_from([12, 24]),
        num_spare_slots=st.sampled_from([0, 1, 3]),
    )
    def start(
        self,
        num_requests: int,
        spacing: int,
        num_host_states: int,
        num_host_slots: int,
        num_blocks: int,
        num_spare_slots: int,
    ) -> None:
        self.served: list[list[int]] = []
        self.transferred: list[tuple[Handover, tuple[int, ...], bool]] = []
        self.depth = 1 if num_host_states else DEPTH
        self.kv = manager(
            num_blocks,
            num_requests=num_requests,
            num_spare_slots=num_spare_slots,
            spacing=spacing,
            depth=self.depth,
            num_host_states=num_host_states,
            num_host_slots=num_host_slots,
        )
        assert self.kv.states is not None
        self.states = self.kv.states

    @rule(
        prompt=prompts(),
        salt=st.sampled_from([None, None, None, "a"]),
    )
    def begin(self, prompt: list[int], salt: str | None) -> None:
        self.num_added += 1
        request = request_for(str(self.num_added), prompt, cache_salt=salt)
        found, fits = self.kv.lookup.match(request), self.kv.fits(request)
        assert found.num_computed_tokens == found.num_tokens < request.num_tokens
        assert self.kv.reserve(request, found) is fits
        if fits:
            self.held.append(request)
            request.catch_up(self.kv.num_computed_tokens(request))
            assert request.num_computed_tokens == found.num_tokens

    @precondition(lambda self: not self.flights)
    @rule(prompt=prompts(), num_tokens=st.integers(1, 8))
    def serve(self, prompt: list[int], num_tokens: int) -> None:
        """A request comes, is computed and ends."""
        num_held = len(self.held)
        self.begin(prompt, None)
        if len(self.held) > num_held:
            request = self.held[-1]
            while request.num_scheduled_tokens < request.num_tokens:
                self.plan_chunk(request, num_tokens, heeds_ends=True)
                self.land()
            self.drop(request)
            self.served.append(prompt)

    @precondition(lambda self: self.held and len(self.flights) < self.depth)
    @rule(data=st.data(), num_tokens=st.integers(1, 8), heeds_ends=st.booleans())
    def plan(self, data: st.DataObject, num_tokens: int, heeds_ends: bool) -> None:
        request = data.draw(st.sampled_from(self.held))
        self.plan_chunk(request, num_tokens, heeds_ends=heeds_ends)

    def plan_chunk(self, request: Request, num_tokens: int, *, heeds_ends: bool) -> None:
        end = min(request.num_tokens, request.num_scheduled_tokens + num_tokens)
        if heeds_ends:
            end = self.kv.chunk_end(request, end)
        if end > request.num_scheduled_tokens:
            kept = set(self.states.checkpoints.slots.values())
            chunk = planned(self.kv, request, end)
            assert chunk.state is not None
            assert chunk.state.destination not in kept & set(
                self.states.checkpoints.slots.values()
            ), "a checkpoint is written to"
            self.flights.append(Flight(request, chunk))
            self.move()

    def move(self) -> None:
        """Make the copies of states; where there are any, no other step is in flight."""
        for move in self.kv.take_moves():
            if move.group == STATES and move.to_host:
                self.host[move.slot] = self.contents[move.block_id]
            elif move.group == STATES:
                self.contents[move.block_id] = self.host[move.slot]

    @precondition(lambda self: self.flights)
    @rule()
    def land(self) -> None:
        request, chunk = self.flights.popleft()
        assert chunk.state is not None
        tokens = tuple(request.token_ids)
        if request not in self.held:
            self.contents[chunk.state.destination] = None
            self.kv.end_step()
            return
        assert self.contents[chunk.state.source] == tokens[: chunk.start]
        self.contents[chunk.state.destination] = tokens[: chunk.end]
        landed(self.kv, request, chunk)

    @precondition(lambda self: self.flights)
    @rule(counts=st.booleans())
    def fail(self, counts: bool) -> None:
        """The oldest step fails, or does not count; those after it are withdrawn."""
        while len(self.flights) > 1:
            request, chunk = self.flights.pop()
            request.num_scheduled_tokens -= chunk.num_tokens
            self.spoil(chunk)
            self.kv.withdraw([chunk])
        request, chunk = self.flights.pop()
        self.spoil(chunk)
        self.kv.end_step()
        if request in self.held:
            self.kv.landed(chunk, ChunkResult(chunk.num_tokens - 1) if counts else None)
            request.settle()
            if counts:
                self.kv.commit(request)

    def spoil(self, chunk: ScheduledChunk) -> None:
        assert chunk.state is not None
        self.contents[chunk.state.destination] = None

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def find_again(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.held))
        before = request.num_scheduled_tokens
        request.catch_up(self.kv.find_again(request))
        assert request.num_scheduled_tokens >= before

    @precondition(lambda self: self.held and self.flights)
    @rule(data=st.data())
    def follow(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.held))
        writer, chunk = data.draw(st.sampled_from(list(self.flights)))
        if writer in self.held and self.kv.leads(chunk, writer, request):
            assert writer.token_ids[: chunk.end] == request.token_ids[: chunk.end]
            assert writer.message.service == request.message.service

    @precondition(lambda self: not self.flights)
    @rule(data=st.data(), prompt=prompts())
    def begin_transfer(self, data: st.DataObject, prompt: list[int]) -> None:
        """Without a step in flight, as in an engine with transfers of states."""
        sends = bool(self.served) and data.draw(st.booleans())
        if sends:
            prompt = data.draw(st.sampled_from(self.served))
        request = request_for("transferred", prompt)
        handover = (self.kv.handovers.send if sends else self.kv.handovers.receive)(request)
        self.move()
        if handover is None:
            return
        tokens = tuple(prompt[: handover.num_blocks * BLOCK_SIZE])
        assert handover.slot is not None
        if not sends:
            self.contents[handover.slot] = tokens
        self.transferred.append((handover, tokens, sends))

    @precondition(lambda self: self.transferred)
    @rule(data=st.data(), is_whole=st.booleans())
    def end_transfer(self, data: st.DataObject, is_whole: bool) -> None:
        one = data.draw(st.sampled_from(self.transferred))
        self.transferred.remove(one)
        handover, tokens, sends = one
        assert self.contents[handover.slot] == tokens
        if is_whole and not sends:
            self.kv.handovers.keep(handover)
        self.kv.handovers.let_go(handover)
        if is_whole and not sends:
            assert num_hit(self.kv, list(tokens)) == len(tokens)

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
        assert self.routers.own.ends() == cached_ends(self.kv)

    @invariant()
    def slots_are_conserved(self) -> None:
        if hasattr(self, "kv"):
            check_blocks(self.kv)

    @invariant()
    def checkpoints_are_the_states_of_their_blocks(self) -> None:
        if not hasattr(self, "kv"):
            return
        kept = self.states.checkpoints
        here = {key: self.contents.get(slot) for key, slot in kept.slots.items()}
        spilled = {key: self.host.get(slot) for key, slot in kept.spilled._slots.items()}
        awaited = {move.slot for move in kept.spilled._moves if move.to_host}
        coming = {move.block_id for move in kept.spilled._moves if not move.to_host}
        nodes: list[tuple[Node, tuple[int, ...]]] = [(self.kv._tree.root, ())]
        while nodes:
            node, before = nodes.pop()
            tokens = before + tuple(node.tokens)
            for i, key in enumerate(node.block_keys(), 1):
                seen = tokens[: node.start + i * BLOCK_SIZE]
                if key in here and kept.slots[key] not in coming:
                    assert here[key] == seen
                if key in spilled and kept.spilled._slots[key] not in awaited:
                    assert spilled[key] == seen
            nodes += [(child, tokens) for child in node.children.values()]


TestCheckpoints = CheckpointsMachine.TestCase
TestCheckpoints.settings = examples(100, stateful_step_count=50)
