"""Fetches the blocks of one prompt while another engine computes them."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from legato.core.kv_transfer import FetchBlocks
from legato.transfer.block_memory import CacheMemory, Spans
from legato.transfer.link_use import LinkUse
from legato.transfer.mover import Mover, Read, StuckReadError, TransferError
from legato.transfer.protocol import (
    Ask,
    Challenge,
    Connection,
    Done,
    FromExporter,
    Gone,
    Hello,
    Layout,
    Told,
    TransferRefusal,
    Welcome,
    is_proof,
    new_nonce,
    proof,
)

logger = logging.getLogger(__name__)

_LOOK_S = 0.001
_EARLY_LOOK_S = 0.02
_MOST_BYTES = 1 << 26
"""Bytes of one read: blocks that have come are used while others are read."""


class Wanted(NamedTuple):
    """Blocks to fill with those of a prompt.

    Attributes:
        prompt_digest: as in `Hold`.
        first: index in the prompt of the first of `block_ids`.
        note: called after each answer with the number of blocks confirmed so far.
    """

    source: FetchBlocks
    prompt_digest: bytes
    block_ids: Sequence[int]
    first: int
    note: Callable[[int], object]


class Fetcher:
    """Reads blocks of other engines into this engine's cache.

    Args:
        key, layout: as in `ExportService`.
        patience_s: longest wait for another engine.

    Attributes:
        link: measures the bytes read.
    """

    def __init__(
        self, mover: Mover, memory: CacheMemory, layout: Layout, key: bytes, *, patience_s: float
    ) -> None:
        self._mover = mover
        self._memory = memory
        self._layout = layout
        self._key = key
        self._patience_s = patience_s
        self.link = LinkUse()
        self._peers: dict[bytes, str] = {}  # key a mover's metadata, value its name

    async def fetch(self, wanted: Wanted) -> None:
        """Fill blocks as far as they are available, then report that this reader is done.

        When this returns or raises, nothing writes to the blocks any more, except after
        `StuckReadError`.

        Raises:
            StuckReadError: a read can be neither ended nor stopped, so it may still write.
            TransferError: why not all blocks were filled.
        """
        source = wanted.source
        try:
            async with asyncio.timeout(self._patience_s):
                streams = await asyncio.open_connection(source.host, source.port)
        except (OSError, OverflowError, ValueError) as error:  # the address may be invalid
            raise TransferError(f"no engine answers there: {error}") from error
        connection = Connection(*streams, FromExporter, timeout_s=self._patience_s)
        try:
            welcome = await self._greet(connection)
            if not wanted.block_ids:
                # An export records readers that are done only after it has begun.
                await self._ask(connection, wanted, 0, time.monotonic() + self._patience_s)
                await self._leave(connection, source)
                return
            peer = self._connect(welcome.metadata)
            there = self._memory_there(welcome)
            try:
                await self._follow(connection, peer, there, wanted)
            except TransferError:
                self._forget(welcome.metadata)
                raise
        finally:
            connection.close()

    async def _greet(self, connection: Connection) -> Welcome:
        challenge = await connection.receive()
        if not isinstance(challenge, Challenge):
            raise TransferError("it does not begin with a challenge")
        nonce = new_nonce()
        shown = proof(self._key, "fetch", challenge.nonce)
        await connection.send(Hello(nonce, shown, self._layout))
        welcome = await connection.receive()
        if isinstance(welcome, TransferRefusal):
            raise TransferError(f"it refuses: {welcome.reason}")
        if not isinstance(welcome, Welcome):
            raise TransferError("it neither welcomes nor refuses")
        if not is_proof(welcome.proof, self._key, "export", nonce):
            raise TransferError("the keys of the two engines differ")
        return welcome

    def _connect(self, metadata: bytes) -> str:
        if metadata not in self._peers:
            self._peers[metadata] = self._mover.connect(metadata)
        return self._peers[metadata]

    def _memory_there(self, welcome: Welcome) -> CacheMemory:
        """Return the other engine's memory, whose blocks are as large as here."""
        ours, theirs = self._memory.groups, welcome.groups
        if list(map(len, ours)) != list(map(len, theirs)) or not all(
            len({region.num_blocks for region in group}) == 1 for group in theirs
        ):
            raise TransferError("its cache has other groups")
        groups = tuple(
            tuple(r.at(at.address, at.num_blocks) for r, at in zip(*pair, strict=True))
            for pair in zip(ours, theirs, strict=True)
        )
        return CacheMemory(groups=groups, gpu=welcome.gpu)

    def _forget(self, metadata: bytes) -> None:
        peer = self._peers.pop(metadata, None)
        if peer is not None:
            self._mover.disconnect(peer)

    async def _follow(
        self, connection: Connection, peer: str, there: CacheMemory, asked: Wanted
    ) -> None:
        """Read offered blocks until all are read; each answer confirms the blocks read before."""
        ours, theirs = asked.block_ids, list[int]()  # wanted blocks here and there, in prompt order
        num_known = num_read = 0
        gives_up_s = time.monotonic() + self._patience_s
        while num_read < len(ours):
            told = await self._ask(connection, asked, num_known, gives_up_s)
            asked.note(num_read)
            if told.block_ids:
                gives_up_s = time.monotonic() + self._patience_s
            theirs += told.block_ids[max(0, asked.first - num_known) :]
            num_known += len(told.block_ids)
            end = min(len(theirs), len(ours), num_read + self._most_blocks)
            if end > num_read:
                if max(theirs[num_read:end]) >= there.num_blocks:
                    raise TransferError("it offers blocks that it does not have")
                try:
                    spans = self._memory.spans(ours[num_read:end], there, theirs[num_read:end])
                except ValueError as error:
                    raise TransferError(f"it offers {error}") from None
                await self._read(connection, peer, spans, there.gpu)
                num_read = end
            elif told.is_complete:
                break
            elif time.monotonic() > gives_up_s:
                raise TransferError("nothing more is computed there")
        await self._leave(connection, asked.source)
        asked.note(num_read)

    async def _leave(self, connection: Connection, source: FetchBlocks) -> None:
        await connection.send(Done(source.transfer_id, source.reader, source.num_readers))
        if isinstance(await connection.receive(), Gone):
            raise TransferError("the blocks were given up before they were read")

    async def _ask(
        self, connection: Connection, asked: Wanted, num_known: int, gives_up_s: float
    ) -> Told:
        source = asked.source
        while True:
            await connection.send(Ask(source.transfer_id, asked.prompt_digest, num_known))
            told = await connection.receive()
            if isinstance(told, Told):
                return told
            is_to_come = source.is_early and not num_known and time.monotonic() < gives_up_s
            if not isinstance(told, Gone) or not is_to_come:
                raise TransferError("it keeps no such prompt of that name")
            await asyncio.sleep(_EARLY_LOOK_S)

    @property
    def _most_blocks(self) -> int:
        return max(1, _MOST_BYTES // self._memory.largest_bytes)

    async def _read(self, connection: Connection, peer: str, spans: Spans, gpu: int | None) -> None:
        """Copy blocks; return once nothing writes any more."""
        num_bytes = 0
        self.link.begin()
        try:
            await self._copy(connection, self._mover.read(peer, spans, gpu))
            num_bytes = int(spans[:, 2].sum())
        finally:
            self.link.end(num_bytes)

    async def _copy(self, connection: Connection, read: Read) -> None:
        ends_s = time.monotonic() + self._patience_s
        try:
            while (state := read.state()) == "running":
                if connection.is_lost or time.monotonic() > ends_s:
                    raise TransferError("the other engine is lost")
                await asyncio.sleep(_LOOK_S)
        except BaseException:
            await self._stop(read)
            raise
        if state == "failed":
            raise TransferError("the other engine cannot be read from")

    async def _stop(self, read: Read) -> None:
        """Wait, at most `patience_s`, until nothing writes any more."""
        ends_s = time.monotonic() + self._patience_s
        while not is_over(read):
            if time.monotonic() > ends_s:
                raise StuckReadError(read)
            await asyncio.sleep(_EARLY_LOOK_S)


def is_over(read: Read) -> bool:
    """Cancel a read; return whether nothing writes any more."""
    return read.state() != "running" or read.cancel()
