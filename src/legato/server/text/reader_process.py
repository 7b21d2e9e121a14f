"""The HTTP server's side of one process that reads bodies."""

import asyncio
import contextlib
import os
import signal
from collections import deque

import msgspec

from legato.core.token_ids import TokenIds
from legato.engine.process.channel import FrameDecoder, pack_frame
from legato.engine.process.pulse import Pulse
from legato.server.requests.outcome import End, Part, PromptTokens
from legato.server.requests.serving import Kind
from legato.server.text.messages import LOW_BY, BodyFollows, ReaderBegun

_READ_BYTES = 1 << 18
_MAX_SILENT = 5
"""As of `Pulse`: less than for an engine, since a body can be read again."""


class ReaderLostError(Exception):
    """The process ended before its answer did."""


class Outcome(msgspec.Struct, frozen=True):
    """What came of a body."""

    parts: list[Part]
    end: End

    @property
    def prompts(self) -> list[TokenIds]:
        return [part.token_ids for part in self.parts if isinstance(part, PromptTokens)]


class ReaderProcess:
    """Reads one body at a time.

    Attributes:
        number: the zygote's name for it.
        num_bodies: that it was given.
        is_lowered: whether it was given up on as one that is quick.
        status: how it ended, as `ReaderEnded` has it.
    """

    def __init__(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.number = number
        self.num_bodies = 0
        self.is_lowered = False
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._reader = reader
        self._writer = writer
        self._frames = FrameDecoder(Part | End | ReaderBegun)
        self._messages = deque[Part | End | ReaderBegun]()
        self._pid = 0  # before it has begun

    @property
    def is_gone(self) -> bool:
        return self._reader.at_eof()

    async def begun(self) -> bool:
        """Wait until it has been forked; returns False if that failed."""
        try:
            message = await self._next()
        except ReaderLostError:
            return False
        assert isinstance(message, ReaderBegun)
        self._pid = message.pid
        return True

    async def read(self, kind: Kind, body: bytearray, stored: bytes | None) -> Outcome:
        """Have a body read, beside what it needs of what is stored.

        Raises:
            ReaderLostError: the process ended over it.
        """
        self.num_bodies += 1
        num_stored_bytes = None if stored is None else len(stored)
        self._writer.write(pack_frame(BodyFollows(kind, len(body), num_stored_bytes)))
        self._writer.write(body)
        self._writer.write(stored or b"")
        parts: list[Part] = []
        while not isinstance(message := await self._next(), End):
            assert not isinstance(message, ReaderBegun), "it begins once"
            parts.append(message)
        return Outcome(parts, message)

    def pulse(self) -> Pulse:
        """Of the process, which has been given a body."""
        return Pulse(self._pid, _MAX_SILENT)

    def lower(self) -> None:
        """Let it run at a low priority from now on."""
        self.is_lowered = True
        with contextlib.suppress(ProcessLookupError):
            nice = os.getpriority(os.PRIO_PROCESS, 0) + LOW_BY
            os.setpriority(os.PRIO_PROCESS, self._pid, nice)

    def kill(self) -> None:
        """End it, whatever it is doing, stopped or not."""
        if self._pid and not self.is_gone:  # as long as its socket is open, its pid is its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Let it end, at once where it has nothing to do."""
        self._writer.transport.abort()

    async def _next(self) -> Part | End | ReaderBegun:
        """What it says next; raises `ReaderLostError` if it has ended."""
        while not self._messages:
            try:
                data = await self._reader.read(_READ_BYTES)
            except OSError as error:
                raise ReaderLostError from error
            if not data:
                raise ReaderLostError
            self._messages += self._frames.feed(data)
        return self._messages.popleft()
