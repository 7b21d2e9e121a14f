"""Host memory that evicted blocks are copied to, so that they need not be computed again."""

from collections import OrderedDict

from legato.core.plan import BlockMove
from legato.kv.prefix_node import Node


class HostPool:
    """Slots of one block each, and the copies that the next step has to begin with.

    Args:
        num_slots: 0 for none, so that what is evicted is lost; an attribute too.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        # Least recently spilled first. Blocks are evicted, and let go of, from the deepest up, so
        # that the first one has none below it.
        self._spilled: OrderedDict[Node, None] = OrderedDict()
        self._moves: list[BlockMove] = []

    def take_moves(self) -> tuple[BlockMove, ...]:
        """The copies to be made, in this order, before anything is written to the blocks."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def spill(self, node: Node) -> Node | None:
        """Take over a block that is evicted.

        Returns:
            the block that is lost for it, which may be itself; None where there was a free slot.
        """
        lost = None
        if self._free:
            slot = self._free.pop()
        elif self._spilled:
            lost, _ = self._spilled.popitem(last=False)
            slot = lost.slot
        else:
            return node
        self._moves.append(BlockMove(node.block_id, slot, to_host=True))
        node.block_id, node.slot = -1, slot
        self._spilled[node] = None
        return lost

    def hold(self, node: Node) -> None:
        """Keep a spilled block, because it is about to be restored."""
        del self._spilled[node]

    def let_go(self, node: Node) -> None:
        """Give up on restoring a block."""
        self._spilled[node] = None

    def restore(self, node: Node, block_id: int) -> None:
        """Copy a block that is held back, to where it is used from now on."""
        self._moves.append(BlockMove(block_id, node.slot, to_host=False))
        self.replace(node, block_id)

    def replace(self, node: Node, block_id: int) -> None:
        """Use a block with the same contents in the place of one that is held."""
        self._free.append(node.slot)
        node.block_id, node.slot = block_id, -1
