"""Checkpoints: recurrent states that are kept, so that later prompts can begin after them.

A checkpoint belongs to the end of a block of the prefix tree, and is known by that block's key. A
request that begins there only reads it, so any number of requests may. With swap space, an evicted
checkpoint goes to the host's memory, wherever its block is.
"""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from legato.kv.cache_events import CacheEvents
from legato.kv.prefix_node import Way
from legato.kv.spilled_copies import SpilledCopies

_MOST_STALE = 64


class StateCheckpoint:
    """A state that is kept in its slot, which no step writes.

    Attributes:
        key: block of the tree after which it is the state.
        slot: its slot; None while it is in host memory.
        num_saved_tokens: tokens that a request which begins here need not compute, but would have
            to after the checkpoint before it.
        is_shared: whether a request has begun here.
        num_users: requests whose next chunk reads it.
        entry: number of its valid entry among those to be evicted; None while it has users.
    """

    __slots__ = ("entry", "is_shared", "key", "num_saved_tokens", "num_users", "slot")

    def __init__(self, key: int, slot: int, num_saved_tokens: int) -> None:
        self.key = key
        self.slot: int | None = slot
        self.num_saved_tokens = num_saved_tokens
        self.is_shared = False
        self.num_users = 1
        self.entry: int | None = None


class Checkpoints:
    """The checkpoints of a cache, by blocks of the tree.

    The checkpoint of least value is evicted first. All slots have the same size, so its value is
    the tokens that it saves, plus the value of the last one that was evicted before its last use:
    what saves little or was not used for long goes (GreedyDual; Young, 1994, and Cao and Irani,
    1997). A checkpoint with users is never evicted.

    Args:
        num_host_slots: evicted checkpoints that host memory can keep.

    Attributes:
        spilled: evicted checkpoints in host memory.
    """

    def __init__(self, num_host_slots: int = 0) -> None:
        self.spilled = SpilledCopies(num_host_slots)
        self._checkpoints: dict[int, StateCheckpoint] = {}  # key block
        self._level = 0  # value of the last evicted checkpoint
        # Heap of (value, entry, checkpoint) of each checkpoint without users, and of stale entries.
        self._least: list[tuple[int, int, StateCheckpoint]] = []
        self._num_entries = 0
        self._events = CacheEvents()

    def report_to(self, events: CacheEvents) -> None:
        """Report the checkpoints that come and go to a journal, as ends of hits."""
        self._events = events

    def __len__(self) -> int:
        return len(self._checkpoints)

    def __contains__(self, key: object) -> bool:
        return key in self._checkpoints

    @property
    def slots(self) -> dict[int, int]:
        """Slots of all checkpoints that have one; key their block's key."""
        kept = self._checkpoints.items()
        return {key: one.slot for key, one in kept if one.slot is not None}

    def cut(self, way: Way) -> Way:
        """Cut a path of the tree to the last checkpoint on it; to nothing if there is none."""
        for node in reversed(way.nodes):
            size = node.block_size
            keys = node.block_keys(0, (min(node.end, way.num_tokens) - node.start) // size)
            for i in reversed(range(len(keys))):
                if keys[i] in self._checkpoints:
                    end = node.start + (i + 1) * size
                    return way if end == way.num_tokens else way.up_to(end)
        return way if not way.num_tokens else way.up_to(0)

    def add(self, checkpoint: StateCheckpoint) -> None:
        """Keep a state, whose request is its first user; its block must have no other."""
        assert checkpoint.key not in self._checkpoints, "a block has two checkpoints"
        self._checkpoints[checkpoint.key] = checkpoint
        self._events.ends_changed(checkpoint.key)

    def use(self, key: int, take_slot: Callable[[], int]) -> StateCheckpoint:
        """Return a block's checkpoint for a request that begins there, and keep it meanwhile.

        Args:
            take_slot: returns a slot for it if it is in host memory.
        """
        checkpoint = self._checkpoints[key]
        checkpoint.num_users += 1
        checkpoint.is_shared = True
        checkpoint.entry = None
        if checkpoint.slot is None:
            spilled = self.spilled.take(key)
            checkpoint.slot = take_slot()
            self.spilled.restore(spilled, checkpoint.slot)
        return checkpoint

    def let_go(self, checkpoint: StateCheckpoint) -> None:
        """Remove a user."""
        checkpoint.num_users -= 1
        if checkpoint.num_users:
            return
        self._num_entries += 1
        checkpoint.entry = self._num_entries
        value = self._level + checkpoint.num_saved_tokens
        heappush(self._least, (value, checkpoint.entry, checkpoint))
        if len(self._least) > _MOST_STALE + 2 * len(self._checkpoints):
            self._least = [one for one in self._least if one[2].entry == one[1]]
            heapify(self._least)

    def evict(self) -> int:
        """Spill or remove the checkpoint of least value; return its slot. There must be one."""
        while True:
            value, entry, checkpoint = heappop(self._least)
            if checkpoint.entry == entry:
                self._level = value
                slot = checkpoint.slot
                assert slot is not None, "what is in host memory has no entry"
                self._spill(checkpoint, slot)
                return slot

    def _spill(self, checkpoint: StateCheckpoint, slot: int) -> None:
        if not self.spilled.num_slots:
            self._remove(checkpoint)
            return
        checkpoint.slot = checkpoint.entry = None
        dropped = self.spilled.spill(checkpoint.key, slot)
        if dropped is not None:
            self._remove(self._checkpoints[dropped])

    def drop(self, checkpoint: StateCheckpoint) -> int | None:
        """Remove a checkpoint that no other request has begun at.

        Returns:
            its slot; None if it stays, has none, or is gone already.
        """
        is_here = self._checkpoints.get(checkpoint.key) is checkpoint
        if not is_here or checkpoint.is_shared or checkpoint.num_users:
            return None
        return self._remove(checkpoint)

    def forget(self, keys: Iterable[int]) -> list[int]:
        """Remove the checkpoints of blocks that leave the tree, and return their slots."""
        found = [self._checkpoints[key] for key in keys if key in self._checkpoints]
        assert not any(checkpoint.num_users for checkpoint in found), "its users have its block"
        slots = [self._remove(checkpoint) for checkpoint in found]
        return [slot for slot in slots if slot is not None]

    def rename(self, keys: Iterable[int], new_keys: Iterable[int]) -> None:
        """Record other keys of blocks of the tree."""
        for key, new_key in zip(keys, new_keys, strict=True):
            checkpoint = self._checkpoints.pop(key, None)
            if checkpoint is not None:
                checkpoint.key = new_key
                self._checkpoints[new_key] = checkpoint
                self.spilled.rename(key, new_key)

    def _remove(self, checkpoint: StateCheckpoint) -> int | None:
        self.spilled.forget(checkpoint.key)
        del self._checkpoints[checkpoint.key]
        self._events.ends_changed(checkpoint.key)
        checkpoint.entry = None
        return checkpoint.slot
