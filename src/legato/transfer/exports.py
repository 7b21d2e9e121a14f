"""Prompts with blocks that other engines may fetch, while their leases last."""

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import takewhile

import msgspec


class Offer(msgspec.Struct, frozen=True):
    """The available blocks of a prompt.

    Attributes:
        block_ids: blocks that the other engine does not know yet.
        is_complete: whether there will be no more.
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
    """Prompts that other engines may fetch.

    The engine's loop adds them; the thread that talks to other engines reads them. Each answer to
    an engine renews its lease, and confirms that all blocks read so far were still kept when they
    were read: once a prompt is given up, the next answer says so.

    Args:
        lease_s: how long a complete prompt is kept without a request for it.

    Attributes:
        num_expired: prompts with expired leases.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.lease_s = lease_s
        self._clock = clock
        self.num_expired = 0
        self._lock = threading.Lock()
        self._exports: dict[str, _Export] = {}  # key transfer id
        self._leases: OrderedDict[str, None] = OrderedDict()  # ids, the first lease to end first
        self._released: list[str] = []
        self._awaited: set[str] = set()
        self._changed: list[str] = []

    def begin(self, transfer_id: str, prompt_digest: bytes) -> bool:
        """Add a prompt with nothing computed yet; return False if its id is in use."""
        with self._lock:
            if transfer_id in self._exports:
                return False
            self._exports[transfer_id] = _Export(prompt_digest)
            return True

    def grow(self, transfer_id: str, block_ids: Iterable[int]) -> None:
        """Add computed blocks."""
        with self._lock:
            export = self._exports.get(transfer_id)
            if export is not None:
                export.block_ids += block_ids
                self._note_change(transfer_id)

    def complete(self, transfer_id: str) -> None:
        """Mark a prompt as complete, and start its lease."""
        with self._lock:
            export = self._exports.get(transfer_id)
            if export is not None:
                export.is_complete = True
                self._renew(transfer_id, export)
                self._note_change(transfer_id)

    def give_up(self, transfer_id: str) -> None:
        """Drop a prompt that will not be computed."""
        with self._lock:
            if transfer_id in self._exports:
                self._drop(transfer_id)

    def ask(self, transfer_id: str, prompt_digest: bytes, num_known: int) -> Offer | None:
        """Return a prompt's blocks after its first `num_known`; None if it is not kept.

        If there are none yet, `take_changed` returns its id when there may be.
        """
        with self._lock:
            export = self._exports.get(transfer_id)
            if export is None or export.expires_s <= self._clock():
                return None
            if export.prompt_digest != prompt_digest:
                return None
            if export.is_complete:
                self._renew(transfer_id, export)
            elif num_known >= len(export.block_ids):
                self._awaited.add(transfer_id)
            return Offer(export.block_ids[num_known:], export.is_complete)

    def take_changed(self) -> list[str]:
        """Return the ids of awaited prompts that have grown, or ended, since the last call."""
        if not self._changed:
            return []
        with self._lock:
            taken, self._changed = self._changed, []
            return taken

    def release(self, transfer_id: str, reader: int = 0, num_readers: int = 1) -> bool:
        """Record that a reader is done; drop the prompt after the last reader.

        Args:
            reader, num_readers: as in `FetchBlocks`.

        Returns:
            Whether the prompt was kept until now.
        """
        with self._lock:
            export = self._exports.get(transfer_id)
            if export is None or export.expires_s <= self._clock():
                return False
            export.done_readers.add(reader)
            if len(export.done_readers) >= num_readers:
                self._drop(transfer_id)
            elif export.is_complete:
                self._renew(transfer_id, export)
            return True

    @property
    def has_released(self) -> bool:
        """Whether the blocks of some prompts can be freed."""
        with self._lock:
            return bool(self._released or self._expired())

    def take_released(self) -> list[str]:
        """Return the ids of prompts released since the last call."""
        with self._lock:
            expired = self._expired()
            for transfer_id in expired:
                del self._exports[transfer_id], self._leases[transfer_id]
            self.num_expired += len(expired)
            taken, self._released = self._released + expired, []
            return taken

    def _renew(self, transfer_id: str, export: _Export) -> None:
        export.expires_s = self._clock() + self.lease_s
        self._leases[transfer_id] = None
        self._leases.move_to_end(transfer_id)

    def _drop(self, transfer_id: str) -> None:
        del self._exports[transfer_id]
        self._leases.pop(transfer_id, None)
        self._released.append(transfer_id)
        self._note_change(transfer_id)

    def _note_change(self, transfer_id: str) -> None:
        if transfer_id in self._awaited:
            self._awaited.remove(transfer_id)
            self._changed.append(transfer_id)

    def _expired(self) -> list[str]:
        now_s = self._clock()
        return [*takewhile(lambda key: self._exports[key].expires_s <= now_s, self._leases)]
