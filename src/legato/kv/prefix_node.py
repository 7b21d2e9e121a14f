"""A node of the prefix tree: a run of blocks with branches only after the last one."""

from typing import NamedTuple

from legato.core.cache_salt import Salt
from legato.core.token_ids import TokenIds
from legato.kv.block_ids import BlockIds, block_array

Key = bytes
"""Tokens of one block; a request's first block has the request's salt, if any, before them."""


def host_key(slot: int) -> int:
    """Return the key of a spilled block in a slot of host memory."""
    return ~slot


def is_host_key(key: int) -> bool:
    """Whether a block with this key is spilled."""
    return key < 0


def place_of(key: int) -> int:
    """Return the id of a block, or its slot of host memory, from its key."""
    return ~key if is_host_key(key) else key


class SoughtTokens(NamedTuple):
    """A request's tokens as the tree looks them up, block by block."""

    token_ids: TokenIds
    block_size: int
    salt: Salt | None = None

    def key(self, start: int) -> Key:
        """Return the key of the block that begins with token `start`."""
        tokens = self.token_ids[start : start + self.block_size].tobytes()
        if start or self.salt is None:
            return tokens
        # Longer than a block's tokens, so it never equals a key without a salt.
        return self.salt + b"\0" + tokens


class Node:
    """Consecutive full blocks that the same requests use.

    Attributes:
        key: its key among its parent's children.
        start: number of tokens above it.
        tokens: tokens of its blocks.
        places: ids of its blocks, or slots of host memory if it is spilled.
        num_missing: tokens at its end whose keys and values are still to be computed, by the first
            of its users that is scheduled.
        num_users: requests that have it in their block table. A user of a node uses all of it, and
            all nodes above it.
        children: key the tokens of their first blocks.
        is_fetched: whether a request began to fetch some of its blocks.
        num_cuts: how often it lost blocks at its end.
    """

    __slots__ = (
        "children",
        "is_fetched",
        "is_spilled",
        "key",
        "num_cuts",
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
        self.is_fetched = False
        self.num_cuts = 0
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
        """Tokens of each of its blocks; it must have a block."""
        return len(self.tokens) // len(self.places)

    @property
    def blocks(self) -> slice:
        """Part of its users' block tables that is in it; it must have a block."""
        size = self.block_size
        return slice(self.start // size, self.end // size)

    def block_keys(self, start: int = 0, end: int | None = None) -> BlockIds:
        """Return the keys of its blocks [start, end).

        A block's key is its id; that of a spilled block is made of its slot, and is negative.
        """
        places = self.places[start:end]
        return block_array(map(host_key, places)) if self.is_spilled else places

    @property
    def num_computed_blocks(self) -> int:
        """Number of its first blocks that are computed to their end."""
        return (len(self.tokens) - self.num_missing) // self.block_size

    @property
    def salt(self) -> Salt | None:
        """Salt of the prompts that it begins; None for none, and below another node."""
        num_bytes = len(self.key) - len(self.tokens[: self.block_size].tobytes())
        return self.key[: num_bytes - 1] if num_bytes else None

    @property
    def num_computed_tokens(self) -> int:
        """Computed tokens from the root on, down to its end at most."""
        node = self
        while node.parent is not None and node.num_missing == len(node.tokens):
            node = node.parent
        return node.end - node.num_missing

    @property
    def unfinished(self) -> "list[Node]":
        """This node and the nodes above it that are not computed to their end, the lowest first."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None and node.num_missing:
            nodes.append(node)
            node = node.parent
        return nodes

    def count_computed(self, num_tokens: int) -> "list[tuple[Node, int]]":
        """Count the first `num_tokens` tokens down to its end as computed.

        Only `PrefixTree` calls this, which reports the change.

        Returns:
            The nodes with newly computed tokens, from the root on, each with the number of its
            blocks that were computed before.
        """
        changed: list[tuple[Node, int]] = []
        node = self
        while node.parent is not None and node.num_missing:
            changed.append((node, node.num_computed_blocks))
            node.num_missing = min(node.num_missing, max(0, node.end - num_tokens))
            node = node.parent
        return changed[::-1]

    def num_equal(self, sought: SoughtTokens, end: int, num_known: int = 0) -> int:
        """Return how many of its tokens equal the sought ones, up to `end`, in whole blocks.

        Args:
            num_known: how many are known to be equal; the first block is, in any case.
        """
        size, start, tokens = sought.block_size, self.start, self.tokens

        def are_equal(first: int, last: int) -> bool:
            part = slice(first * size, last * size)
            return tokens[part] == sought.token_ids[start + part.start : start + part.stop]

        low, high = max(1, num_known // size), min(len(tokens), end - start) // size
        if low < high and not are_equal(low, low + 1):
            return low * size
        if are_equal(low, high):
            return high * size
        while low < high:
            middle = (low + high + 1) // 2
            if are_equal(low, middle):
                low = middle
            else:
                high = middle - 1
        return low * size

    def add(self, node: "Node") -> None:
        """Add a child, whose parent is this node."""
        assert node.key not in self.children, "two blocks with the same tokens"
        self.children[node.key] = node

    def leave(self) -> None:
        """Remove the node from its parent; it must have no children."""
        assert not self.children, "a block is forgotten before those that continue it"
        assert self.parent is not None
        del self.parent.children[self.key]

    def split(self, num_blocks: int) -> "Node":
        """Split the node in two.

        Returns:
            a new node with the first `num_blocks`, the parent of this one, which keeps the others:
            requests refer to the last of their nodes.
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
        above.is_fetched = self.is_fetched
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
        """Remove the last `num_blocks` blocks.

        Returns:
            their places, the last one first.
        """
        assert not self.children, "a block is forgotten before those that continue it"
        size = self.block_size
        places = self.places[: -num_blocks - 1 : -1]
        del self.tokens[-num_blocks * size :]
        del self.places[-num_blocks:]
        self.num_cuts += 1
        self.num_missing = max(0, self.num_missing - num_blocks * size)
        return places


class Way(NamedTuple):
    """A path from the root along the sought tokens; valid until the tree changes.

    Attributes:
        nodes: its nodes, in order; it may end within the last one.
        num_tokens: its tokens from the root on, computed or to be computed by another request.
        uncut_tokens: its tokens before it was cut; None if it was not.
        num_cuts: that of its last node when it was found.
    """

    nodes: list[Node]
    num_tokens: int
    uncut_tokens: int | None = None
    num_cuts: int = 0

    @property
    def num_matched_tokens(self) -> int:
        """Tokens at the start in blocks of the tree, those included that were cut off."""
        return self.num_tokens if self.uncut_tokens is None else self.uncut_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Computed tokens at its start."""
        if not self.nodes:
            return self.num_tokens
        return min(self.num_tokens, self.nodes[-1].num_computed_tokens)

    @property
    def num_used_tokens(self) -> int:
        """Tokens at its start in blocks that requests use."""
        ends = (node.end for node in reversed(self.nodes) if node.num_users)
        return min(self.num_tokens, next(ends, 0))

    @property
    def next_block(self) -> int | None:
        """Block of its first token that is not computed; None if all are."""
        num_computed = self.num_computed_tokens
        if num_computed == self.num_tokens:
            return None
        node = next(node for node in self.nodes if node.end > num_computed)
        return node.places[(num_computed - node.start) // node.block_size]

    def up_to(self, num_tokens: int) -> "Way":
        """Return the path cut to `num_tokens` tokens from the root."""
        nodes = [node for node in self.nodes if node.start < num_tokens]
        return Way(nodes, num_tokens, self.num_matched_tokens)

    def below(self, node: Node) -> "Way":
        """Return the part of the path below one of its nodes, or below the root."""
        return self._replace(nodes=[one for one in self.nodes if one.start >= node.end])
