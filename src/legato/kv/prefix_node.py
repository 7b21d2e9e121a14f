"""A node of the tree of blocks."""

Key = bytes
"""Tokens of one block; in front of a request's first ones the salt that keeps it apart, if any."""


class Node:
    """One full block.

    Attributes:
        block_id: where it lies; -1 while it is in host memory only.
        slot: where it lies in host memory; -1 while it does not.
        num_missing: tokens at its end whose keys and values are still to be computed, by whichever
            of its users is scheduled first.
        num_users: requests whose block table it is in. A user of a node uses all above it too.
    """

    __slots__ = ("block_id", "children", "key", "num_missing", "num_users", "parent", "slot")

    def __init__(
        self, parent: "Node | None", key: Key, block_id: int, num_missing: int, num_users: int
    ) -> None:
        self.parent = parent
        self.key = key
        self.block_id = block_id
        self.slot = -1
        self.num_missing = num_missing
        self.num_users = num_users
        self.children: dict[Key, Node] = {}

    @property
    def is_computed(self) -> bool:
        return not self.num_missing

    @property
    def is_spilled(self) -> bool:
        return self.slot >= 0
