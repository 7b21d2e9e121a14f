"""Places of processes that read: bounded, and shared among tenants by turns."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.api.limits import MAX_READERS, MAX_WAITING_BYTES
from legato.api.readers.lane import Lane
from legato.api.readers.reader_process import ReaderProcess
from legato.engine.errors import OverloadedError
from tests.api.instant_loop import run_at_once

_MOST_OF_ONE = MAX_READERS // 2
"""Places of a tenant that is alone: it leaves as many free as it has."""


class Readers:
    """Makes readers that read nothing.

    Attributes:
        num_forked: so far.
        taken: places of each tenant.
        order: tenants, as they got places.
    """

    def __init__(self) -> None:
        self.num_forked = 0
        self.taken = Counter[str]()
        self.order: list[str] = []
        self._sockets: list[socket.socket] = []

    async def fork(self) -> ReaderProcess:
        self.num_forked += 1
        ours, theirs = socket.socketpair()
        self._sockets.append(theirs)
        return ReaderProcess(self.num_forked, *await asyncio.open_connection(sock=ours))

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()

    def begin(self, lane: Lane, tenant: str, num_bytes: int = 0) -> "Body":
        return Body(self, lane, tenant, num_bytes)


class Body:
    """A body that stays where it is read until `end`."""

    def __init__(self, readers: Readers, lane: Lane, tenant: str, num_bytes: int) -> None:
        self.tenant = tenant
        self.is_read = asyncio.Event()
        self._end = asyncio.Event()
        self.task = asyncio.create_task(self._read(readers, lane, num_bytes))

    async def _read(self, readers: Readers, lane: Lane, num_bytes: int) -> None:
        async with lane.place(self.tenant, num_bytes):
            readers.taken[self.tenant] += 1
            readers.order.append(self.tenant)
            self.is_read.set()
            await self._end.wait()
            readers.taken[self.tenant] -= 1

    async def end(self) -> None:
        self._end.set()
        await self.task


@asynccontextmanager
async def lane_of_readers(
    num_places: int = MAX_READERS,
) -> AsyncIterator[tuple[Lane, Readers]]:
    readers = Readers()
    lane = Lane(readers.fork, num_places)
    try:
        yield lane, readers
    finally:
        lane.end_idle()
        readers.close()


async def settled() -> None:
    """All bodies that wait have lost their patience."""
    await asyncio.sleep(0.12)


async def test_a_flood_of_one_tenant_leaves_places_for_others() -> None:
    async with lane_of_readers() as (lane, readers):
        flood = [readers.begin(lane, "a") for _ in range(3 * MAX_READERS)]
        await settled()
        assert readers.taken["a"] == _MOST_OF_ONE
        others = [readers.begin(lane, tenant) for tenant in ("b", "c", "b")]
        await settled()
        assert readers.taken["b"] >= 1
        assert readers.taken["c"] >= 1
        assert readers.taken.total() <= MAX_READERS
        for body in [*others, *flood]:
            await body.end()
        assert readers.num_forked <= MAX_READERS, "readers are used again"


async def test_on_two_processors_a_tenant_has_one_reader_and_another_tenant_a_second() -> None:
    async with lane_of_readers(num_places=2) as (lane, readers):
        flood = [readers.begin(lane, "a") for _ in range(12)]
        await settled()
        assert (readers.taken["a"], readers.num_forked) == (1, 1)
        other = readers.begin(lane, "b")
        await settled()
        assert readers.taken == {"a": 1, "b": 1}
        for body in [*flood, other]:
            await body.end()
        assert readers.num_forked == 2


async def test_tenants_that_wait_take_turns() -> None:
    async with lane_of_readers() as (lane, readers):
        first = [readers.begin(lane, "a") for _ in range(_MOST_OF_ONE)]
        await settled()
        waiting = [readers.begin(lane, "a") for _ in range(4)]
        await settled()
        waiting += [readers.begin(lane, "b") for _ in range(4)]
        for body in [*first, *waiting]:
            await body.end()
        order = readers.order[_MOST_OF_ONE:]
        assert Counter(order) == {"a": 4, "b": 4}
        assert order.index("b") <= 1


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), min_size=1, max_size=24),
)
def test_no_place_is_lost_and_no_body_forgotten(steps: list[tuple[str, bool]]) -> None:
    """Bodies come and end, or their clients leave while they wait."""

    async def run() -> None:
        async with lane_of_readers() as (lane, readers):
            bodies: list[Body] = []
            for tenant, comes in steps:
                if comes or not bodies:
                    bodies.append(readers.begin(lane, tenant))
                    await asyncio.sleep(0)
                else:
                    body = bodies.pop(len(tenant) % len(bodies))
                    if body.is_read.is_set():
                        await body.end()
                    else:
                        body.task.cancel()
                        await asyncio.wait([body.task])
                assert readers.taken.total() <= MAX_READERS
            await settled()
            waiting = {body.tenant for body in bodies if not body.is_read.is_set()}
            for tenant in waiting:
                assert readers.taken[tenant] >= MAX_READERS - readers.taken.total()
            await asyncio.gather(*(body.end() for body in bodies))
            assert readers.taken.total() == 0
            last = [readers.begin(lane, "e") for _ in range(_MOST_OF_ONE)]
            await settled()
            assert readers.taken["e"] == _MOST_OF_ONE
            for body in last:
                await body.end()

    run_at_once(run())


async def test_a_slow_body_moves_where_its_tenant_has_a_place() -> None:
    async with lane_of_readers() as (quick, readers), lane_of_readers() as (slow, _):
        async with AsyncExitStack() as reading:
            for index in range(_MOST_OF_ONE + 1):
                place = await reading.enter_async_context(quick.place("a", 0))
                assert slow.moved(place) == (index < _MOST_OF_ONE)
                assert (place.lane is slow) == (index < _MOST_OF_ONE)
            other = await reading.enter_async_context(quick.place("b", 0))
            assert slow.moved(other)
        again = [readers.begin(quick, "a") for _ in range(_MOST_OF_ONE)]
        await settled()
        assert readers.taken["a"] == _MOST_OF_ONE
        for body in again:
            await body.end()


async def test_bytes_that_wait_are_bounded_and_leave_room_for_others() -> None:
    """A body alone may have any size; all that waits of one tenant takes half of the room."""
    async with lane_of_readers() as (lane, readers):
        busy = [readers.begin(lane, tenant) for tenant in "aabbc"]
        await settled()
        assert readers.taken.total() == len(busy)
        first = readers.begin(lane, "a", MAX_WAITING_BYTES // 2)
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError) as refused:
            await readers.begin(lane, "a", 1).task
        assert refused.value.retry_after_s
        other = readers.begin(lane, "b", MAX_WAITING_BYTES // 4)
        await settled()
        assert not first.is_read.is_set()
        assert not other.is_read.is_set()
        for body in [*busy, first, other]:
            await body.end()
