"""The HTTP server's side of a reader process."""

import asyncio
import contextlib
import os
import signal
from collections import deque

from legato.api.bodies.body_model import Kind
from legato.api.job import End, Part
from legato.api.readers.reader_messages import (
    SLOW_NICENESS,
    BodyFollows,
    ReaderBegun,
    ReaderRetires,
)
from legato.engine.process.channel import FrameDecoder, pack_frame
from legato.engine.process.pulse import Pulse, processor_time_s

_READ_BYTES = 1 << 18
_MAX_SILENT = 5
"""As of `Pulse`: fewer than for an engine, since a body can be read again."""
Reading = tuple[list[Part], End]
_Message = Part | End | ReaderBegun | ReaderRetires


class ReaderLostError(Exception):
    """The process ended before its answer did."""


class ReaderProcess:
    """A reader process; it reads one body at a time.

    Attributes:
        number: its id in the zygote.
        num_bodies: bodies that it was given.
        is_lowered: whether it was moved to a low priority for a slow body.
        is_retiring: whether it ends after the answer that it gave, or gives.
        status: how it ended, as in `ReaderEnded`.
    """

    def __init__(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.number = number
        self.num_bodies = 0
        self.is_lowered = False
        self.is_retiring = False
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._reader = reader
        self._writer = writer
        self._frames = FrameDecoder(_Message)
        self._messages = deque[_Message]()
        self._pid = 0  # until it has begun

    @property
    def is_gone(self) -> bool:
        return self._reader.at_eof()

    async def begun(self) -> bool:
        """Wait until it has been forked; return False if that failed."""
        try:
            message = await self._next()
        except ReaderLostError:
            return False
        assert isinstance(message, ReaderBegun)
        self._pid = message.pid
        return True

    async def read(self, kind: Kind, body: bytearray, stored: bytes | None) -> Reading:
        """Read a body, with the stored responses that it needs; return its parts and end.

        Raises:
            ReaderLostError: the process ended before its answer did.
        """
        self.num_bodies += 1
        num_stored_bytes = None if stored is None else len(stored)
        self._writer.write(pack_frame(BodyFollows(kind, len(body), num_stored_bytes)))
        self._writer.write(body)
        self._writer.write(stored or b"")
        parts: list[Part] = []
        while not isinstance(message := await self._next(), End):
            assert not isinstance(message, ReaderBegun), "it begins once"
            if isinstance(message, ReaderRetires):
                self.is_retiring = True
            else:
                parts.append(message)
        return parts, message

    def pulse(self) -> Pulse:
        """Return a watch on the process, which has just been given a body."""
        return Pulse(self._pid, _MAX_SILENT)

    def processor_time_s(self) -> float:
        """Return how long it has computed so far."""
        return processor_time_s(self._pid)

    def lower(self) -> None:
        """Lower its priority from now on."""
        self.is_lowered = True
        with contextlib.suppress(ProcessLookupError):
            nice = os.getpriority(os.PRIO_PROCESS, 0) + SLOW_NICENESS
            os.setpriority(os.PRIO_PROCESS, self._pid, nice)

    def kill(self) -> None:
        """Kill it, even if it is stopped."""
        if self._pid and not self.is_gone:  # while its socket is open, no other process has its pid
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Let it end, at once if it is idle."""
        self._writer.transport.abort()

    async def _next(self) -> _Message:
        """Return its next message; raises `ReaderLostError` if it has ended."""
        while not self._messages:
            try:
                data = await self._reader.read(_READ_BYTES)
            except OSError as error:
                raise ReaderLostError from error
            if not data:
                raise ReaderLostError
            self._messages += self._frames.feed(data)
        return self._messages.popleft()
