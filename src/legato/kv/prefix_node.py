"""A node of the tree of blocks: a run of them, which only its last one's tokens branch off from."""

from typing import NamedTuple

from legato.core.block_ids import BlockIds
from legato.core.token_ids import TokenIds

Key = bytes
"""Tokens of one block; in front of a request's first ones the salt that keeps it apart, if any."""


class SoughtTokens(NamedTuple):
    """A request's tokens as the tree looks them up, block by block."""

    token_ids: TokenIds
    block_size: int
    salt: str | None = None

    def key(self, start: int) -> Key:
        """Of the block that begins with token `start`."""
        tokens = self.token_ids[start : start + self.block_size].tobytes()
        if start or self.salt is None:
            return tokens
        # Longer than a block's tokens, so that it is never taken for one without a salt.
        return f"{self.salt}\0".encode() + tokens


class Node:
    """Full blocks, one under the other, that the same requests use.

    Attributes:
        key: what its parent finds it by.
        start: tokens above it.
        tokens: of its blocks.
        places: where its blocks lie: their ids, or slots of host memory where it is spilled.
        num_missing: tokens at its end whose keys and values are still to be computed, by whichever
            of its users is scheduled first.
        num_users: requests whose block table it is in. A user of a node uses all of it, and all
            above it too.
        children: key the tokens of their first blocks.
    """

    __slots__ = (
        "children",
        "is_spilled",
        "key",
        "num_missing",
        "num_users",
        "parent",
        "places",
        "start",
        "tokens",
    )

    def __init__(
        self,
        parent: "Node | None",
        key: Key,
        start: int,
        tokens: TokenIds,
        places: BlockIds,
        *,
        num_missing: int = 0,
        num_users: int = 0,
        is_spilled: bool = False,
    ) -> None:
        self.parent = parent
        self.key = key
        self.start = start
        self.tokens = tokens
        self.places = places
        self.num_missing = num_missing
        self.num_users = num_users
        self.is_spilled = is_spilled
        self.children: dict[Key, Node] = {}

    @property
    def end(self) -> int:
        """Tokens from the root to its end."""
        return self.start + len(self.tokens)

    @property
    def num_blocks(self) -> int:
        return len(self.places)

    @property
    def block_size(self) -> int:
        """Tokens of each of its blocks; it must have one."""
        return len(self.tokens) // len(self.places)

    @property
    def num_computed_blocks(self) -> int:
        """Those of its own, from the first on, that are computed to their end."""
        return (len(self.tokens) - self.num_missing) // self.block_size

    @property
    def is_salted(self) -> bool:
        """Whether, being the first of a prompt, it is kept apart from others with its tokens."""
        return len(self.key) > len(self.tokens[: self.block_size].tobytes())

    @property
    def num_computed_tokens(self) -> int:
        """From the root to its end, those at the start that are computed."""
        node = self
        while node.parent is not None and node.num_missing == len(node.tokens):
            node = node.parent
        return node.end - node.num_missing

    @property
    def unfinished(self) -> "list[Node]":
        """Itself and those above it that are not computed to their ends, the lowest first."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None and node.num_missing:
            nodes.append(node)
            node = node.parent
        return nodes

    def count_computed(self, num_tokens: int) -> "list[tuple[Node, int]]":
        """So many tokens from the root to its end are computed; `PrefixTree` tells of it.

        Returns:
            The nodes of which more is computed now, from the root on, with the blocks of each that
            were before.
        """
        changed: list[tuple[Node, int]] = []
        node = self
        while node.parent is not None and node.num_missing:
            changed.append((node, node.num_computed_blocks))
            node.num_missing = min(node.num_missing, max(0, node.end - num_tokens))
            node = node.parent
        return changed[::-1]

    def num_equal(self, sought: SoughtTokens, end: int) -> int:
        """How many of its tokens are the sought ones, up to `end`; whole blocks.

        The first block is known to be equal.
        """
        size, start, tokens = sought.block_size, self.start, self.tokens
        if len(tokens) == size:
            return size
        low, high = 1, min(len(tokens), end - start) // size
        if tokens[: high * size] == sought.token_ids[start : start + high * size]:
            return high * size
        while low < high:
            middle = (low + high + 1) // 2
            half = slice(low * size, middle * size)
            if tokens[half] == sought.token_ids[start + half.start : start + half.stop]:
                low = middle
            else:
                high = middle - 1
        return low * size

    def add(self, node: "Node") -> None:
        """Put a node, which has this one as its parent, under it."""
        assert node.key not in self.children, "two blocks with the same tokens"
        self.children[node.key] = node

    def leave(self) -> None:
        """Be no child of its parent any more; it has no children itself."""
        assert not self.children, "a block is forgotten before those that continue it"
        assert self.parent is not None
        del self.parent.children[self.key]

    def split(self, num_blocks: int) -> "Node":
        """Be two nodes.

        Returns:
            the first `num_blocks`, as the parent of this one, which keeps the others: requests
            refer to the last of their nodes.
        """
        assert self.parent is not None
        size = self.block_size
        cut = num_blocks * size
        above = Node(
            self.parent,
            self.key,
            self.start,
            self.tokens[:cut],
            self.places[:num_blocks],
            num_missing=max(0, self.num_missing - (len(self.tokens) - cut)),
            num_users=self.num_users,
            is_spilled=self.is_spilled,
        )
        self.parent.children[self.key] = above
        self.parent = above
        self.start += cut
        del self.tokens[:cut]
        del self.places[:num_blocks]
        self.num_missing = min(self.num_missing, len(self.tokens))
        self.key = self.tokens[:size].tobytes()
        above.add(self)
        return above

    def cut(self, num_blocks: int) -> BlockIds:
        """Be without its last blocks.

        Returns:
            where they lie, the last one first.
        """
        assert not self.children, "a block is forgotten before those that continue it"
        size = self.block_size
        places = self.places[: -num_blocks - 1 : -1]
        del self.tokens[-num_blocks * size :]
        del self.places[-num_blocks:]
        self.num_missing = max(0, self.num_missing - num_blocks * size)
        return places


class Way(NamedTuple):
    """From the root down, as far as the tree has what is sought, as long as that is not changed.

    Attributes:
        nodes: that it leads through, in their order; it may end within the last one.
        num_tokens: in them and above them, computed or to be computed by another request.
    """

    nodes: list[Node]
    num_tokens: int

    @property
    def num_computed_tokens(self) -> int:
        """Those at its start that are computed."""
        if not self.nodes:
            return self.num_tokens
        return min(self.num_tokens, self.nodes[-1].num_computed_tokens)

    @property
    def num_used_tokens(self) -> int:
        """Those at its start that are in blocks in use."""
        ends = (node.end for node in reversed(self.nodes) if node.num_users)
        return min(self.num_tokens, next(ends, 0))

    @property
    def next_block(self) -> int | None:
        """The block that the first token of it goes to that is not computed; None if all are."""
        num_computed = self.num_computed_tokens
        if num_computed == self.num_tokens:
            return None
        node = next(node for node in self.nodes if node.end > num_computed)
        return node.places[(num_computed - node.start) // node.block_size]

    def up_to(self, num_tokens: int) -> "Way":
        """As far as so many tokens from the root on."""
        return Way([node for node in self.nodes if node.start < num_tokens], num_tokens)
