"""The HTTP server's side of one process that reads bodies."""

import asyncio

import msgspec

from legato.core.token_ids import TokenIds
from legato.engine.process.channel import FrameDecoder, pack_frame
from legato.server.requests.outcome import End, Part, PromptTokens
from legato.server.requests.serving import Kind
from legato.server.text.messages import BodyFollows

_READ_BYTES = 1 << 18


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
        self._frames = FrameDecoder(Part | End)

    @property
    def is_gone(self) -> bool:
        return self._reader.at_eof()

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
        try:
            while data := await self._reader.read(_READ_BYTES):
                for message in self._frames.feed(data):
                    if isinstance(message, End):
                        return Outcome(parts, message)
                    parts.append(message)
        except OSError as error:
            raise ReaderLostError from error
        raise ReaderLostError

    def close(self) -> None:
        """Let it end, at once where it has nothing to do."""
        self._writer.transport.abort()
