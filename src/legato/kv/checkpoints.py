"""Checkpoints: recurrent states that are kept, so that later prompts can begin after them.

A checkpoint belongs to the end of a block of the prefix tree, and is known by that block's id. A
request that begins there only reads it, so any number of requests may.
"""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from legato.kv.cache_events import CacheEvents
from legato.kv.prefix_node import Way

_MOST_STALE = 64


class Checkpoint:
    """A state that is kept in its slot, which no step writes.

    Attributes:
        key: block of the tree after which it is the state.
        slot: its slot.
        num_saved_tokens: tokens that a request which begins here need not compute, but would have
            to after the checkpoint before it.
        is_shared: whether a request has begun here.
        num_users: requests whose next chunk reads it.
        entry: number of its valid entry among those to be evicted; None while it has users.
    """

    __slots__ = ("entry", "is_shared", "key", "num_saved_tokens", "num_users", "slot")

    def __init__(self, key: int, slot: int, num_saved_tokens: int) -> None:
        self.key = key
        self.slot = slot
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
    """

    def __init__(self) -> None:
        self._checkpoints: dict[int, Checkpoint] = {}  # key block
        self._level = 0  # value of the last evicted checkpoint
        # Heap of (value, entry, checkpoint) of each checkpoint without users, and of stale entries.
        self._least: list[tuple[int, int, Checkpoint]] = []
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
        """Slots of all checkpoints; key their block."""
        return {key: checkpoint.slot for key, checkpoint in self._checkpoints.items()}

    def cut(self, way: Way) -> Way:
        """Cut a path of the tree to the last checkpoint on it; to nothing if there is none."""
        for node in reversed(way.nodes):
            size = node.block_size
            for i in reversed(range((min(node.end, way.num_tokens) - node.start) // size)):
                if node.places[i] in self._checkpoints:
                    end = node.start + (i + 1) * size
                    return way if end == way.num_tokens else way.up_to(end)
        return way if not way.num_tokens else way.up_to(0)

    def add(self, checkpoint: Checkpoint) -> None:
        """Keep a state, whose request is its first user; its block must have no other."""
        assert checkpoint.key not in self._checkpoints, "a block has two checkpoints"
        self._checkpoints[checkpoint.key] = checkpoint
        self._events.end_added(checkpoint.key)

    def use(self, key: int) -> Checkpoint:
        """Return a block's checkpoint for a request that begins there, and keep it meanwhile."""
        checkpoint = self._checkpoints[key]
        checkpoint.num_users += 1
        checkpoint.is_shared = True
        checkpoint.entry = None
        return checkpoint

    def let_go(self, checkpoint: Checkpoint) -> None:
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
        """Remove the checkpoint of least value, and return its slot; there must be one."""
        while True:
            value, entry, checkpoint = heappop(self._least)
            if checkpoint.entry == entry:
                self._level = value
                return self._remove(checkpoint)

    def drop(self, checkpoint: Checkpoint) -> int | None:
        """Remove a checkpoint that no other request has begun at.

        Returns:
            its slot; None if it stays, or is gone already.
        """
        is_here = self._checkpoints.get(checkpoint.key) is checkpoint
        if not is_here or checkpoint.is_shared or checkpoint.num_users:
            return None
        return self._remove(checkpoint)

    def forget(self, keys: Iterable[int]) -> list[int]:
        """Remove the checkpoints of blocks that leave the tree, and return their slots."""
        found = [self._checkpoints[key] for key in keys if key in self._checkpoints]
        assert not any(checkpoint.num_users for checkpoint in found), "its users have its block"
        return [self._remove(checkpoint) for checkpoint in found]

    def _remove(self, checkpoint: Checkpoint) -> int:
        del self._checkpoints[checkpoint.key]
        self._events.end_removed(checkpoint.key)
        checkpoint.entry = None
        return checkpoint.slot
