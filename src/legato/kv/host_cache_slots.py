"""Host memory that evicted blocks are copied to, so that they need not be computed again."""

from collections import OrderedDict

from legato.core.plan import BlockMove
from legato.kv.block_ids import BlockIds, block_array
from legato.kv.cache_events import CacheEvents
from legato.kv.dependents import Dependents
from legato.kv.prefix_node import Node, host_key


class HostCacheSlots:
    """Slots of one block each, and the copies that the next step must begin with.

    Args:
        num_slots: number of slots, also an attribute; with 0, evicted blocks are lost.
        events: journal of the blocks that come and go.
        dependents: what is kept beside the blocks.
    """

    def __init__(
        self,
        num_slots: int,
        events: CacheEvents | None = None,
        dependents: Dependents | None = None,
    ) -> None:
        self.num_slots = num_slots
        self._events = events or CacheEvents()
        self._dependents = dependents or Dependents()
        self._free = list(range(num_slots))
        # Least recently spilled first. Blocks are evicted, and let go, from the deepest up, so the
        # first node has none below it.
        self._spilled: OrderedDict[Node, None] = OrderedDict()
        self._moves: list[BlockMove] = []

    def take_moves(self) -> tuple[BlockMove, ...]:
        """Return the copies to make, in this order, before any write to the blocks."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def spill(self, node: Node) -> None:
        """Take over an evicted node, or as much of its start as there are slots for.

        Its other blocks leave the tree, and so do spilled blocks that make room for it.
        """
        while len(self._free) < node.num_blocks and self._spilled:
            oldest = next(iter(self._spilled))
            self._cut(oldest, min(node.num_blocks - len(self._free), oldest.num_blocks))
        if len(self._free) < node.num_blocks:
            lost = node.cut(node.num_blocks - len(self._free))
            self._dependents.gone(lost)
            self._events.removed(lost, from_host=False)
        if not node.places:
            node.leave()
            return
        block_ids = node.places
        self._events.removed(block_ids[::-1], from_host=False, is_moved=True)
        slots = block_array(self._free.pop() for _ in block_ids)
        self._moves += map(BlockMove, block_ids, slots, [True] * len(slots))
        node.places, node.is_spilled = slots, True
        self._dependents.moved(block_ids, node.block_keys())
        self._spilled[node] = None
        self._events.stored(node)

    def forget(self) -> None:
        """Forget all spilled nodes that are not held."""
        while self._spilled:
            node = next(iter(self._spilled))
            self._cut(node, node.num_blocks)

    def hold(self, node: Node) -> None:
        """Keep a spilled node that is about to be restored."""
        self._spilled.pop(node, None)

    def let_go(self, node: Node) -> None:
        """Undo `hold` for a node that will not be restored."""
        self._spilled[node] = None

    def restore(self, node: Node, block_ids: BlockIds) -> None:
        """Copy a held node's blocks back to `block_ids`, its places from now on."""
        self._moves += map(BlockMove, block_ids, node.places, [False] * len(block_ids))
        self.replace(node, block_ids)

    def replace(self, node: Node, block_ids: BlockIds) -> None:
        """Replace a held node's slots by blocks with the same contents."""
        keys = node.block_keys()
        self._free_slots(node.places, is_moved=True)
        node.places, node.is_spilled = block_ids, False
        self._dependents.moved(keys, block_ids)
        self._events.stored(node)

    def _cut(self, node: Node, num_blocks: int) -> None:
        """Remove the last blocks of the least recently spilled node."""
        slots = node.cut(num_blocks)
        self._dependents.gone(block_array(map(host_key, slots)))
        self._free_slots(slots)
        if not node.places:
            del self._spilled[node]
            node.leave()

    def _free_slots(self, slots: BlockIds, *, is_moved: bool = False) -> None:
        self._events.removed(slots, from_host=True, is_moved=is_moved)
        self._free += slots
