"""A node of the tree of blocks."""

import copy
from collections.abc import Collection, Iterable
from typing import Any

import msgspec

Key = bytes
"""Tokens of one block; in front of a request's first ones the salt that keeps it apart, if any."""


class Node(msgspec.Struct, eq=False):
    """One full block. A struct, because hundreds of them are made in a step that admits a prompt.

    Attributes:
        block_id: where it lies; -1 while it is in host memory only.
        slot: where it lies in host memory; -1 while it does not.
        num_missing: tokens at its end whose keys and values are still to be computed, by whichever
            of its users is scheduled first.
        num_users: requests whose block table it is in. A user of a node uses all above it too.
    """

    parent: "Node | None"
    key: Key
    block_id: int
    num_missing: int
    num_users: int
    slot: int = -1
    # Nearly all have one child at most, for which a dictionary would be most of the node.
    _children: "Node | dict[Key, Node] | None" = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Node":
        # A struct is copied parts first, which never ends where a child refers to its parent.
        node = memo[id(self)] = Node(
            None, self.key, self.block_id, self.num_missing, self.num_users, self.slot
        )
        node.parent = copy.deepcopy(self.parent, memo)
        node._children = copy.deepcopy(self._children, memo)
        return node

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

    def leave(self) -> None:
        """Be no child of its parent any more; it has no children itself."""
        assert not self._children, "a block is forgotten before those that continue it"
        parent = self.parent
        assert parent is not None
        if parent._children is self:
            parent._children = None
        else:
            assert isinstance(parent._children, dict)
            del parent._children[self.key]

    def add_chain(
        self, keys: Iterable[Key], block_ids: Iterable[int], *, num_missing: int
    ) -> list["Node"]:
        """Put new nodes, each under the one before and used once, under this one."""
        chain: list[Node] = []
        parent = self
        for key, block_id in zip(keys, block_ids, strict=True):
            node = Node(parent, key, block_id, num_missing, 1)
            if chain:
                parent._children = node
            chain.append(node)
            parent = node
        if chain:
            self.add(chain[0])
        return chain
