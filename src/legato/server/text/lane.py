"""Processes that read bodies of one size, and the bodies that wait for one of them."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from legato.core.outputs import RefusalReason
from legato.engine.errors import OverloadedError
from legato.server.limits import MAX_READERS, MAX_WAITING_BYTES
from legato.server.text.reader_process import ReaderProcess

PATIENCE_S = 0.05
"""How long a body waits for a reader that is busy before another one is forked."""
_RETRY_AFTER_S = 1.0
_IDLE_S = 10.0


class Lane:
    """Hands out readers: first come, first served.

    There is one as long as nobody waits, and up to `MAX_READERS` while they are busy.

    Args:
        fork: makes another.
    """

    def __init__(self, fork: Callable[[], Awaitable[ReaderProcess]]) -> None:
        self._fork = fork
        self._num_readers = 0
        self._idle: list[ReaderProcess] = []  # the last one that worked stands last
        self._waiting: deque[asyncio.Future[ReaderProcess]] = deque()
        self._num_waiting_bytes = 0

    async def warm_up(self) -> None:
        """Have a reader ready."""
        async with self.reader(0):
            pass

    @asynccontextmanager
    async def reader(self, num_bytes: int) -> AsyncGenerator[ReaderProcess]:
        """A reader that does nothing else, for a body of so many bytes.

        It is not used again where the context raises.

        Raises:
            OverloadedError: too much is waiting.
        """
        reader = await self._take(num_bytes)
        try:
            yield reader
        except BaseException:
            self._drop(reader)
            raise
        self._give_back(reader)

    async def _take(self, num_bytes: int) -> ReaderProcess:
        while self._idle:
            reader = self._idle.pop()
            if not reader.is_gone:
                return reader
            self._drop(reader)
        if self._num_readers == 0:
            return await self._another()
        if self._num_waiting_bytes and self._num_waiting_bytes + num_bytes > MAX_WAITING_BYTES:
            raise OverloadedError(
                "too many bodies wait to be read",
                reason=RefusalReason.QUEUE_FULL,
                retry_after_s=_RETRY_AFTER_S,
            )
        self._num_waiting_bytes += num_bytes
        try:
            return await self._wait()
        finally:
            self._num_waiting_bytes -= num_bytes

    async def _wait(self) -> ReaderProcess:
        turn: asyncio.Future[ReaderProcess] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            while not turn.done():
                await asyncio.wait([turn], timeout=PATIENCE_S)
                if not turn.done() and self._num_readers < MAX_READERS:
                    turn.cancel()
                    return await self._another()
        except asyncio.CancelledError:
            # Whoever gives a reader back passes over a turn that is done.
            if not turn.cancel() and not turn.cancelled():
                self._give_back(turn.result())
            raise
        return turn.result()

    async def _another(self) -> ReaderProcess:
        self._num_readers += 1
        try:
            return await self._fork()
        except BaseException:
            self._num_readers -= 1
            raise

    def _give_back(self, reader: ReaderProcess) -> None:
        if reader.is_lowered or reader.is_gone:
            self._drop(reader)
            return
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(reader)
                return
        self._idle.append(reader)
        if len(self._idle) > 1:
            longest = self._idle[0]
            asyncio.get_running_loop().call_later(
                _IDLE_S, self._end_idle, longest, longest.num_bodies
            )

    def _end_idle(self, reader: ReaderProcess, num_bodies: int) -> None:
        """Unless it has worked since it had read that many, or is the last one."""
        if len(self._idle) > 1 and reader in self._idle and reader.num_bodies == num_bodies:
            self._idle.remove(reader)
            self._drop(reader)

    def _drop(self, reader: ReaderProcess) -> None:
        self._num_readers -= 1
        reader.close()
