"""A pool of reader processes for one kind of body, and the bodies that wait for one."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from legato.api.limits import MAX_WAITING_BYTES
from legato.api.readers.reader_process import ReaderProcess
from legato.core.outputs import RefusalReason
from legato.core.rotation import Rotation
from legato.engine.errors import OverloadedError

PATIENCE_S = 0.05
"""How long a body waits for a busy reader before another is forked."""
_RETRY_AFTER_S = 1.0
_IDLE_S = 10.0


class ReaderPlace:
    """A lane's place, with a reader.

    Attributes:
        tenant: the owner of the body that it reads.
    """

    def __init__(self, lane: "Lane", tenant: str, reader: ReaderProcess) -> None:
        self.lane = lane
        self.tenant = tenant
        self.reader = reader


class Lane:
    """Assigns readers to bodies; tenants take turns.

    A tenant may take a place as long as it has fewer than are free, so that there is always one for
    a tenant that has none (dynamic thresholds: Choudhury and Hahne, 1998). The same holds for the
    bytes that wait.

    Args:
        fork: starts a reader.
        num_places: readers that work at the same time.
    """

    def __init__(self, fork: Callable[[], Awaitable[ReaderProcess]], num_places: int) -> None:
        self._fork = fork
        self._num_places = num_places
        self._idle: list[ReaderProcess] = []  # the most recently used is last
        self._num_taken = Counter[str]()  # places; key: tenant
        self._waiting = Rotation[tuple[str, asyncio.Future[ReaderProcess | None]]]()
        """Waiting bodies with their tenants. Each gets an idle reader, or None to fork one."""
        self._waiting_bytes = Counter[str]()  # key: tenant

    async def warm_up(self, tenant: str) -> None:
        """Have a reader ready."""
        async with self.place(tenant, 0):
            pass

    @asynccontextmanager
    async def place(self, tenant: str, num_bytes: int) -> AsyncGenerator[ReaderPlace]:
        """Hold a place and its reader, for a body of this size.

        If the block raises, the reader is closed and not used again.

        Raises:
            OverloadedError: too many bytes wait.
        """
        place = ReaderPlace(self, tenant, await self._take(tenant, num_bytes))
        try:
            yield place
        except BaseException:
            place.lane._free(tenant)
            place.reader.close()
            raise
        place.lane._free(tenant, place.reader)

    def moved(self, place: ReaderPlace) -> bool:
        """Move a place from another lane to this one; return False if none is free."""
        if not self._may_take(place.tenant):
            return False
        self._num_taken[place.tenant] += 1
        place.lane._free(place.tenant)
        place.lane = self
        return True

    def end_idle(self) -> None:
        """End all idle readers."""
        for reader in self._idle:
            reader.kill()
            reader.close()
        self._idle.clear()

    def _may_take(self, tenant: str) -> bool:
        return self._num_taken[tenant] < self._num_places - self._num_taken.total()

    async def _take(self, tenant: str, num_bytes: int) -> ReaderProcess:
        if self._may_take(tenant) and (reader := self._idle_reader()) is not None:
            self._num_taken[tenant] += 1
            return reader
        own, free = self._waiting_bytes[tenant], MAX_WAITING_BYTES - self._waiting_bytes.total()
        if own and own + num_bytes > free:
            raise OverloadedError(
                "too many bodies wait to be read",
                reason=RefusalReason.QUEUE_FULL,
                retry_after_s=_RETRY_AFTER_S,
            )
        self._waiting_bytes[tenant] += num_bytes
        try:
            reader = await self._turn(tenant)
        finally:
            self._waiting_bytes[tenant] -= num_bytes
            self._waiting_bytes += Counter()  # drops tenants with a count of zero
        if reader is not None:
            return reader
        try:
            return await self._fork()
        except BaseException:
            self._free(tenant)
            raise

    async def _turn(self, tenant: str) -> ReaderProcess | None:
        """Wait for a place; return its reader, or None if one must be forked."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[ReaderProcess | None] = loop.create_future()
        self._waiting.add(tenant, (tenant, turn))
        # Not cancelled with this turn: another body may then take its place.
        loop.call_later(PATIENCE_S if self._num_taken else 0.0, self._hand_on)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._free(tenant, turn.result())
            raise

    def _free(self, tenant: str, reader: ReaderProcess | None = None) -> None:
        """Free a place; another body may use its reader, if given."""
        self._num_taken[tenant] -= 1
        self._num_taken += Counter()  # drops tenants with a count of zero
        if reader is not None:
            self._rest(reader)
        self._hand_on()

    def _hand_on(self) -> None:
        """Give a free place to the next body in turn."""
        while (found := self._waiting.take(self._may_take)) is not None:
            tenant, turn = found
            if not turn.done():  # otherwise its client has disconnected
                self._num_taken[tenant] += 1
                turn.set_result(self._idle_reader())
                return

    def _idle_reader(self) -> ReaderProcess | None:
        while self._idle:
            reader = self._idle.pop()
            if not reader.is_gone:
                return reader
            reader.close()
        return None

    def _rest(self, reader: ReaderProcess) -> None:
        if reader.is_lowered or reader.is_retiring or reader.is_gone:
            reader.close()
            return
        self._idle.append(reader)
        if len(self._idle) > 1:
            longest = self._idle[0]
            asyncio.get_running_loop().call_later(
                _IDLE_S, self._end_longest, longest, longest.num_bodies
            )

    def _end_longest(self, reader: ReaderProcess, num_bodies: int) -> None:
        """End a reader that has not worked since, unless it is the last idle one."""
        if len(self._idle) > 1 and reader in self._idle and reader.num_bodies == num_bodies:
            self._idle.remove(reader)
            reader.close()
