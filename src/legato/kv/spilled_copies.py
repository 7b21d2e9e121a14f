"""Host memory for what is kept beside blocks of the tree: copies of a window group, or states."""

from collections import OrderedDict

from legato.core.plan import BlockMove


class SpilledCopies:
    """Slots of one group, by keys of blocks of the tree, and the copies that the next step makes.

    Args:
        num_slots: number of slots, also an attribute; with 0, nothing is spilled.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        # Least recently spilled first; key a block's key, value a slot.
        self._slots: OrderedDict[int, int] = OrderedDict()
        self._moves: list[BlockMove] = []

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def take_moves(self, group: int) -> list[BlockMove]:
        """Return the copies to make, in this order. Args: group: as in `BlockMove`."""
        moves, self._moves = self._moves, []
        return [BlockMove(move.block_id, move.slot, move.to_host, group) for move in moves]

    def spill(self, key: int, place: int) -> int | None:
        """Copy a place of the group to a slot; there must be slots.

        Returns:
            the key of the copy that was dropped to make room; None if none was.
        """
        dropped: int | None = None
        if not self._free:
            if not self._slots:
                return key  # all slots are being read from
            dropped, slot = self._slots.popitem(last=False)
            self._free.append(slot)
        slot = self._free.pop()
        self._slots[key] = slot
        self._moves.append(BlockMove(place, slot, True))
        return dropped

    def take(self, key: int) -> int:
        """Take a copy out; return its slot, which is kept until `restore`."""
        return self._slots.pop(key)

    def restore(self, slot: int, place: int) -> None:
        """Copy a slot that was taken back to a place of the group."""
        self._moves.append(BlockMove(place, slot, False))
        self._free.append(slot)

    def rename(self, key: int, new_key: int) -> None:
        """Record another key of a block, if it has a copy here."""
        if key in self._slots:
            self._slots[new_key] = self._slots.pop(key)

    def forget(self, key: int) -> None:
        """Drop a block's copy, if it has one here."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._free.append(slot)
