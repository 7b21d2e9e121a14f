"""Requests over states in any order: the tokens of each slot that a step reads."""

from collections import deque
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from legato.core.plan import STATES, ZERO_STATE, ChunkResult, ScheduledChunk
from legato.core.request import Request
from legato.kv.handovers import Handover
from legato.kv.prefix_node import Node
from tests.kv.cache_watcher import cached_ends
from tests.kv.hit_ends import HitEndsMachine
from tests.kv.recurrent import BLOCK_SIZE, DEPTH, landed, manager, num_hit, planned
from tests.kv.requests import request_for
from tests.profiles import examples


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


class CheckpointsMachine(HitEndsMachine):
    """Requests over few tokens in a small cache, with up to three steps in flight.

    The contents of each slot are kept as all tokens up to its state. With swap space, one step is
    in flight at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.depth = DEPTH
        self.host: dict[int, tuple[int, ...] | None] = {}
        self.flights: deque[Flight] = deque()
        self.contents: dict[int, tuple[int, ...] | None] = {ZERO_STATE: ()}

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
        self.add(prompt, salt)

    @precondition(lambda self: not self.flights)
    @rule(prompt=prompts(), num_tokens=st.integers(1, 8))
    def serve(self, prompt: list[int], num_tokens: int) -> None:
        self.serve_in_chunks(prompt, num_tokens)

    @precondition(lambda self: self.held and len(self.flights) < self.depth)
    @rule(data=st.data(), num_tokens=st.integers(1, 8), heeds_ends=st.booleans())
    def plan(self, data: st.DataObject, num_tokens: int, heeds_ends: bool) -> None:
        request = data.draw(st.sampled_from(self.held))
        self.plan_chunk(request, num_tokens, heeds_ends=heeds_ends)

    def plan_chunk(self, request: Request, num_tokens: int, *, heeds_ends: bool = True) -> None:
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

    def check_ends(self) -> None:
        assert self.routers.own.ends() == cached_ends(self.kv)

    @invariant()
    def checkpoints_are_the_states_of_their_blocks(self) -> None:
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
