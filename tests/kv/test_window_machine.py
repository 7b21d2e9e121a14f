"""Requests over windows in any order: what each slot holds that a step reads."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from legato.core.request import Request
from legato.kv.block_ids import BlockIds
from legato.kv.handovers import Handover
from legato.kv.window_group import WindowGroup
from tests.kv.hit_ends import HitEndsMachine
from tests.kv.requests import request_for
from tests.kv.windowed import BLOCK_SIZE, MAX_REQUESTS, MOST_ROWS, WINDOWS, check_ends, manager
from tests.profiles import examples


class Flight(NamedTuple):
    """A chunk under way: what its step names."""

    request: Request
    start: int
    end: int
    tables: tuple[BlockIds, ...]


Place = tuple[dict[tuple[int, int], tuple[int, ...]], tuple[int, int]]


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=16)


class WindowsMachine(HitEndsMachine):
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
        # What transfers fill, with the prompt, and what they read.
        self.received: list[tuple[Handover, tuple[int, ...]]] = []
        self.sent: list[tuple[Handover, tuple[int, ...]]] = []
        assert self.kv.windows is not None
        self.windows = (None, *WINDOWS)
        self.host: dict[int, list[tuple[int, ...] | None]] = {}  # of the first group; key slot
        self.flights: deque[Flight] = deque()
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
        self.add(prompt)

    @precondition(lambda self: not self.flights)
    @rule(prompt=PROMPTS, num_tokens=st.integers(1, MOST_ROWS))
    def serve(self, prompt: list[int], num_tokens: int) -> None:
        self.serve_in_chunks(prompt, num_tokens)

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
        for handover, prompt in self.sent:
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

    def check_ends(self) -> None:
        check_ends(self.kv, self.routers.own)


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
