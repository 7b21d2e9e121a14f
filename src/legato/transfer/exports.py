"""Prompts whose blocks other engines may fetch, for as long as these ask for them."""

import math
import threading
import time
from collections.abc import Callable, Iterable

import msgspec


class Offer(msgspec.Struct, frozen=True):
    """What there is of a prompt.

    Attributes:
        block_ids: those that were not known before.
        is_complete: there will not be more.
    """

    block_ids: list[int]
    is_complete: bool


class _Export:
    def __init__(self, prompt_digest: bytes) -> None:
        self.prompt_digest = prompt_digest
        self.block_ids: list[int] = []
        self.is_complete = False
        self.expires_s = math.inf
        self.done_readers: set[int] = set()


class Exports:
    """Filled by the engine's loop, and asked by the thread that speaks to other engines.

    What is told to another engine renews its lease, and says that all it has read so far was there
    when it read it: nothing is given up in between without the next answer saying so.

    Args:
        lease_s: how long a prompt that is complete is kept for whoever does not ask.

    Attributes:
        num_expired: prompts whose leases ran out.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.lease_s = lease_s
        self._clock = clock
        self.num_expired = 0
        self._lock = threading.Lock()
        self._exports: dict[str, _Export] = {}  # key transfer id
        self._released: list[str] = []

    def begin(self, transfer_id: str, prompt_digest: bytes) -> bool:
        """Nothing is computed yet; False where there is one of that name already."""
        with self._lock:
            if transfer_id in self._exports:
                return False
            self._exports[transfer_id] = _Export(prompt_digest)
            return True

    def grow(self, transfer_id: str, block_ids: Iterable[int]) -> None:
        """Further blocks are computed."""
        with self._lock:
            export = self._exports.get(transfer_id)
            if export is not None:
                export.block_ids += block_ids

    def complete(self, transfer_id: str) -> None:
        """All blocks are there: from now on there is a lease."""
        with self._lock:
            export = self._exports.get(transfer_id)
            if export is not None:
                export.is_complete = True
                export.expires_s = self._clock() + self.lease_s

    def give_up(self, transfer_id: str) -> None:
        """The prompt will not be computed."""
        with self._lock:
            if self._exports.pop(transfer_id, None) is not None:
                self._released.append(transfer_id)

    def ask(self, transfer_id: str, prompt_digest: bytes, num_known: int) -> Offer | None:
        """What there is of a prompt beside its first `num_known` blocks; None if it is not kept."""
        with self._lock:
            export = self._exports.get(transfer_id)
            if export is None or export.expires_s <= self._clock():
                return None
            if export.prompt_digest != prompt_digest:
                return None
            if export.is_complete:
                export.expires_s = self._clock() + self.lease_s
            return Offer(export.block_ids[num_known:], export.is_complete)

    def release(self, transfer_id: str, reader: int = 0, num_readers: int = 1) -> bool:
        """Note that a reader has all that it wants, and give the prompt up after the last one.

        Args:
            reader, num_readers: as of `FetchBlocks`.

        Returns:
            Whether the prompt was kept until now.
        """
        with self._lock:
            export = self._exports.get(transfer_id)
            if export is None or export.expires_s <= self._clock():
                return False
            export.done_readers.add(reader)
            if len(export.done_readers) >= num_readers:
                del self._exports[transfer_id]
                self._released.append(transfer_id)
            elif export.is_complete:
                export.expires_s = self._clock() + self.lease_s
            return True

    @property
    def has_released(self) -> bool:
        """Whether some need not be kept any more."""
        with self._lock:
            return bool(self._released or self._expired())

    def take_released(self) -> list[str]:
        """Those, since the last time."""
        with self._lock:
            expired = self._expired()
            for transfer_id in expired:
                del self._exports[transfer_id]
            self.num_expired += len(expired)
            taken, self._released = self._released + expired, []
            return taken

    def _expired(self) -> list[str]:
        now_s = self._clock()
        return [key for key, export in self._exports.items() if export.expires_s <= now_s]
