"""Moves blocks in a thread of its own, and reports to the engine's loop."""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from legato.core.errors import ConfigError
from legato.core.kv_transfer import BlocksArrived, FetchBlocks
from legato.transfer.block_memory import CacheMemory
from legato.transfer.exports import Exports
from legato.transfer.fetch import Fetcher, Wanted, is_over
from legato.transfer.link_use import LinkUse
from legato.transfer.mover import Mover, StuckReadError, TransferError
from legato.transfer.protocol import Layout
from legato.transfer.service import ExportService

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

_STUCK_LOOK_S = 1.0
"""How often to check a read that can be neither ended nor stopped."""


@dataclass
class StuckFetch:
    """A fetch that has ended while a read of it may still write to the request's blocks.

    Attributes:
        end: the event for the scheduler, once the request has other blocks.
        is_over: whether nothing writes to the blocks any more.
    """

    end: BlocksArrived
    is_over: bool = False


class Transport:
    """Offers prompts to other engines, and fetches theirs.

    All slow work is done in a thread of its own, which listens from the start, if at all.

    Args:
        mover: of the cache's memory; from now on only that thread uses it.
        memory: the cache.
        block_size: tokens of a block.
        port: port to listen on, 0 for any free one; None to fetch only.
        layout, key: as in `ExportService`.
        lease_s: as in `Exports`; also the longest wait for another engine.
        prepare: called first in that thread.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(
        self,
        mover: Mover,
        memory: CacheMemory,
        *,
        block_size: int,
        layout: Layout,
        host: str,
        port: int | None,
        key: bytes,
        lease_s: float,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self.exports = Exports(lease_s)
        self._mover = mover
        self._block_size = block_size
        self._service = ExportService(self.exports, mover, memory, layout, key)
        self._fetcher = Fetcher(mover, memory, layout, key, patience_s=lease_s)
        self._arrived: deque[BlocksArrived] = deque()
        self._stuck: deque[StuckFetch] = deque()
        self._told_s = 0.0  # link time reported so far
        self._fetches: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="transfer", daemon=True)
        self._thread.start()
        self._loop.call_soon_threadsafe(prepare)
        try:
            self.port = 0 if port is None else self._wait_for(self._listen(host, port))
        except OSError as error:
            self.close()
            raise ConfigError(
                f"cannot listen for other engines on {host}:{port}: {error}"
            ) from None

    def fetch(
        self,
        request_id: str,
        source: FetchBlocks,
        block_ids: Sequence[int],
        *,
        start: int,
        prompt_digest: bytes,
    ) -> None:
        """Start filling blocks with a prompt's tokens from `start` on.

        `take_arrived` returns the results, up to the end.
        """
        num_arrived = 0

        def note(num_blocks: int) -> None:
            nonlocal num_arrived
            if num_blocks > num_arrived:
                num_arrived = num_blocks
                self._arrived.append(arrived())

        def arrived(*, is_over: bool = False) -> BlocksArrived:
            busy_s = self.link.busy_s
            read_s, self._told_s = busy_s - self._told_s, busy_s
            return BlocksArrived(
                request_id=request_id,
                num_tokens=start + num_arrived * self._block_size,
                read_s=read_s,
                is_over=is_over,
            )

        async def fetch() -> None:
            first = start // self._block_size
            at = f"{source.host}:{source.port}"
            try:
                await self._fetcher.fetch(Wanted(source, prompt_digest, block_ids, first, note))
            except StuckReadError as error:
                logger.error("the rest of a prompt is not fetched from %s: %s", at, error)
                stuck = StuckFetch(arrived(is_over=True))
                self._stuck.append(stuck)
                while not is_over(error.read):
                    await asyncio.sleep(_STUCK_LOOK_S)
                stuck.is_over = True
                return
            except TransferError as error:
                logger.warning("the rest of a prompt is not fetched from %s: %s", at, error)
            self._arrived.append(arrived(is_over=True))

        self._begin(fetch())

    def decline(self, source: FetchBlocks, prompt_digest: bytes) -> None:
        """Tell another engine that a reader, whose request has ended, wants no blocks."""

        async def decline() -> None:
            with contextlib.suppress(TransferError):  # then its lease expires
                await self._fetcher.fetch(Wanted(source, prompt_digest, (), 0, lambda _: None))

        self._begin(decline())

    @property
    def link(self) -> LinkUse:
        """Measures the bytes fetched."""
        return self._fetcher.link

    @property
    def has_arrived(self) -> bool:
        """Whether there are results to take."""
        return bool(self._arrived or self._stuck)

    def take_arrived(self) -> list[BlocksArrived]:
        """Return the results since the last call."""
        return _taken(self._arrived)

    def take_stuck(self) -> list[StuckFetch]:
        """Return fetches that ended since the last call while a read may still write."""
        return _taken(self._stuck)

    def close(self) -> None:
        """End the thread; nothing is written to the cache after that."""
        if self._thread.is_alive():
            self._wait_for(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._mover.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        def begin() -> None:
            task = self._loop.create_task(work)
            self._fetches.add(task)
            task.add_done_callback(self._fetches.discard)

        self._loop.call_soon_threadsafe(begin)

    def _wait_for(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(self, host: str, port: int) -> int:
        self._server = await asyncio.start_server(self._service.serve, host, port)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def _stop(self) -> None:
        server = getattr(self, "_server", None)
        if server is not None:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def _taken(queue: deque[Result]) -> list[Result]:
    """Take all results that are in the queue now; the thread may add more meanwhile."""
    return [queue.popleft() for _ in range(len(queue))]
