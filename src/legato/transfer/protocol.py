"""The protocol of engines before and during a transfer of blocks.

    fetching engine                     exporting engine
                                    <-  Challenge
    Hello                           ->
                                    <-  Welcome, or Refusal
    Ask, after each read            ->
                                    <-  Told, or Gone
    Done, as the last message       ->
                                    <-  Released, or Gone

Frames are as in `engine/process/channel.py`, of a bounded length, and nothing in them is pickled.
Both engines prove that they have the shared key before they exchange anything else; without a key,
both are on one machine.
"""

import asyncio
import hashlib
import hmac
import secrets
import struct
from typing import Annotated, Any

import msgspec

from legato.transfer.exports import Offer
from legato.transfer.mover import TransferError

_LENGTH = struct.Struct("<I")
_MOST_BYTES = 1 << 20
NONCE_BYTES = 32
MOST_READERS = 2**16

Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
TransferId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Layout = dict[str, str]
"""Properties that blocks of both engines must share; key its name, value in words."""


class Challenge(msgspec.Struct, frozen=True, tag=True):
    nonce: Nonce


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Attributes: `proof`: the fetching engine's, of the challenge."""

    nonce: Nonce
    proof: bytes
    layout: Layout


class RegionAt(msgspec.Struct, frozen=True):
    """Attributes: as in `Region`."""

    address: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    num_blocks: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The memory of the exporting engine's blocks.

    Attributes:
        proof: of `Hello.nonce`.
        metadata: of its mover.
        groups, gpu: as in `CacheMemory`.
    """

    proof: bytes
    metadata: bytes
    groups: list[list[RegionAt]]
    gpu: Annotated[int, msgspec.Meta(ge=0, lt=2**16)] | None = None


class TransferRefusal(msgspec.Struct, frozen=True, tag="Refusal"):
    reason: Annotated[str, msgspec.Meta(max_length=1000)]


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Asks for a prompt's blocks after its first `num_known`.

    Attributes:
        prompt_digest: of the prompt that needs the blocks.
    """

    transfer_id: TransferId
    prompt_digest: bytes
    num_known: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Told(msgspec.Struct, frozen=True, tag=True):
    """See `Offer`."""

    block_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]
    is_complete: bool


class Gone(msgspec.Struct, frozen=True, tag=True):
    """No such prompt is kept, nor was it when the last blocks were read."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """A reader has read all that it wants.

    Attributes:
        reader, num_readers: as in `FetchBlocks`.
    """

    transfer_id: TransferId
    reader: Annotated[int, msgspec.Meta(ge=0, lt=MOST_READERS)] = 0
    num_readers: Annotated[int, msgspec.Meta(ge=1, le=MOST_READERS)] = 1


class Released(msgspec.Struct, frozen=True, tag=True):
    """The prompt was kept until now; it stays while other readers are not done."""


FromFetcher = Hello | Ask | Done
FromExporter = Challenge | Welcome | TransferRefusal | Told | Gone | Released


class Connection:
    """One end of a connection between two engines.

    Args:
        message_type: of incoming messages.
        timeout_s: limit for each message of the other end.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        message_type: Any,
        *,
        timeout_s: float,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self.timeout_s = timeout_s

    @property
    def is_lost(self) -> bool:
        """Whether either end has closed the connection."""
        return self._reader.at_eof() or self._writer.is_closing()

    async def send(self, message: FromFetcher | FromExporter) -> None:
        """Send a message. Raises `TransferError`."""
        body = msgspec.msgpack.encode(message)
        try:
            self._writer.write(_LENGTH.pack(len(body)) + body)
            async with asyncio.timeout(self.timeout_s):
                await self._writer.drain()
        except OSError as error:  # a timeout is one
            raise TransferError(f"the connection is lost: {error}") from error

    async def receive(self) -> Any:
        """Return the next message; raises `TransferError` if it is malformed or does not come."""
        try:
            async with asyncio.timeout(self.timeout_s):
                length = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))[0]
                if length > _MOST_BYTES:
                    raise TransferError(f"a message of {length:,} bytes")
                return self._decoder.decode(await self._reader.readexactly(length))
        except (OSError, EOFError) as error:
            raise TransferError(f"the connection is lost: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TransferError(f"not a message: {error}") from error

    def close(self) -> None:
        self._writer.close()


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(key: bytes, side: str, nonce: bytes) -> bytes:
    """Return the proof that `side`, "fetch" or "export", has the key."""
    return hmac.digest(key, side.encode() + nonce, hashlib.sha256)


def is_proof(shown: bytes, key: bytes, side: str, nonce: bytes) -> bool:
    return hmac.compare_digest(shown, proof(key, side, nonce))


def told(offer: Offer | None) -> Told | Gone:
    return Gone() if offer is None else Told(offer.block_ids, offer.is_complete)
