"""Serves other engines that fetch blocks."""

import asyncio

from legato.transfer.block_memory import CacheMemory
from legato.transfer.exports import Exports, Offer
from legato.transfer.mover import Mover, TransferError
from legato.transfer.protocol import (
    Ask,
    Challenge,
    Connection,
    Done,
    FromFetcher,
    Gone,
    Hello,
    Layout,
    RegionAt,
    Released,
    TransferRefusal,
    Welcome,
    is_proof,
    new_nonce,
    proof,
    told,
)

_HELLO_S = 5.0
_WAIT_S, _MOST_WAIT_S = 0.1, 1.0
"""How long an answer waits for blocks still being computed: first, and after answers without any,
which double it. Each answer also confirms the blocks that were read before."""
_PROGRESS_S = 0.0005
"""How often reads are advanced, which some networks need, and answers sent that can be."""
_MOST_CONNECTIONS = 256


class ExportService:
    """Serves connections of fetching engines.

    Args:
        key: shared by both sides.
        layout: of the blocks; engines with another layout are refused.
    """

    def __init__(
        self, exports: Exports, mover: Mover, memory: CacheMemory, layout: Layout, key: bytes
    ) -> None:
        self._exports = exports
        self._mover = mover
        self._memory = memory
        self._layout = layout
        self._key = key
        self._num_connections = 0
        self._progress: asyncio.Task[None] | None = None
        self._changes: dict[str, asyncio.Event] = {}  # what answers wait for; key transfer id

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        self._num_connections += 1
        connection = Connection(reader, writer, FromFetcher, timeout_s=_HELLO_S)
        try:
            if self._num_connections <= _MOST_CONNECTIONS and await self._welcome(connection):
                # Between two messages, the other side may read for as long as its lease.
                connection.timeout_s = self._exports.lease_s
                self._begin_progress()
                wait_s = _WAIT_S
                while True:
                    has_news = await self._answer(connection, wait_s)
                    wait_s = _WAIT_S if has_news else min(2 * wait_s, _MOST_WAIT_S)
        except TransferError:
            pass  # the engine is done or gone, and its lease runs out
        finally:
            self._num_connections -= 1
            connection.close()

    def _begin_progress(self) -> None:
        """Advance reads and answers while any engine is connected."""
        if self._progress is None or self._progress.done():
            self._progress = asyncio.create_task(self._keep_progressing())

    async def _keep_progressing(self) -> None:
        while self._num_connections:
            self._mover.progress()
            for transfer_id in self._exports.take_changed():
                # None if the prompt has changed twice, or its answer waits no longer.
                change = self._changes.pop(transfer_id, None)
                if change is not None:
                    change.set()
            await asyncio.sleep(_PROGRESS_S)

    async def _welcome(self, connection: Connection) -> bool:
        nonce = new_nonce()
        await connection.send(Challenge(nonce))
        hello = await connection.receive()
        if not isinstance(hello, Hello) or not is_proof(hello.proof, self._key, "fetch", nonce):
            await connection.send(TransferRefusal("the keys of the two engines differ"))
            return False
        differing = sorted(
            name
            for name in self._layout.keys() | hello.layout.keys()
            if self._layout.get(name) != hello.layout.get(name)
        )
        if differing:
            words = [
                f"{n} is {self._layout.get(n)} here and not {hello.layout.get(n)}"
                for n in differing
            ]
            await connection.send(TransferRefusal("; ".join(words)[:1000]))
            return False
        groups = self._memory.groups
        await connection.send(
            Welcome(
                proof(self._key, "export", hello.nonce),
                self._mover.metadata,
                [[RegionAt(r.address, r.num_blocks) for r in group] for group in groups],
                self._memory.gpu,
            )
        )
        return True

    async def _answer(self, connection: Connection, wait_s: float) -> bool:
        """Answer a message; return False if it waited for blocks in vain."""
        match await connection.receive():
            case Ask() as ask:
                offer = await self._offer(ask, wait_s)
                await connection.send(told(offer))
                return offer is None or offer.is_complete or bool(offer.block_ids)
            case Done(transfer_id, reader, num_readers):
                is_kept = self._exports.release(transfer_id, reader, num_readers)
                await connection.send(Released() if is_kept else Gone())
                return True
            case _:
                raise TransferError("it says hello again")

    async def _offer(self, ask: Ask, wait_s: float) -> Offer | None:
        """Wait until there are new blocks or the prompt is complete, and return the offer."""
        ends_s = asyncio.get_running_loop().time() + wait_s
        while True:
            offer = self._exports.ask(ask.transfer_id, ask.prompt_digest, ask.num_known)
            if offer is None or offer.block_ids or offer.is_complete:
                return offer
            change = self._changes.setdefault(ask.transfer_id, asyncio.Event())
            try:
                async with asyncio.timeout_at(ends_s):
                    await change.wait()
            except TimeoutError:
                return offer
