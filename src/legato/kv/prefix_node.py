"""A node of the tree of blocks."""

from collections.abc import Collection

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

    __slots__ = ("_children", "block_id", "key", "num_missing", "num_users", "parent", "slot")

    def __init__(
        self, parent: "Node | None", key: Key, block_id: int, num_missing: int, num_users: int
    ) -> None:
        self.parent = parent
        self.key = key
        self.block_id = block_id
        self.slot = -1
        self.num_missing = num_missing
        self.num_users = num_users
        # Nearly all have one child at most, for which a dictionary would be most of the node.
        self._children: Node | dict[Key, Node] | None = None

    @property
    def is_computed(self) -> bool:
        return not self.num_missing

    @property
    def is_spilled(self) -> bool:
        return self.slot >= 0

    @property
    def children(self) -> Collection["Node"]:
        children = self._children
        if children is None:
            return ()
        return children.values() if isinstance(children, dict) else (children,)

    def child(self, key: Key) -> "Node | None":
        children = self._children
        if isinstance(children, Node):
            return children if children.key == key else None
        return children.get(key) if children else None

    def add(self, node: "Node") -> None:
        """Put a node, which has this one as its parent, under it."""
        if self._children is None:
            self._children = node
            return
        assert self.child(node.key) is None, "two blocks with the same tokens"
        if isinstance(self._children, Node):
            self._children = {self._children.key: self._children}
        self._children[node.key] = node

    def remove(self, node: "Node") -> None:
        """Take back one of its children."""
        if isinstance(self._children, dict):
            del self._children[node.key]
        else:
            assert self._children is node
            self._children = None
