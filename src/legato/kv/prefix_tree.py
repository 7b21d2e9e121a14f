"""A radix tree of full blocks by their tokens, shared by all requests that begin alike.

A node is a run of blocks under its parent, so the path from the root spells all tokens from the
start of a request on, on which the keys and values depend. A node is split where its users begin to
differ, and grows at its end while one request alone uses it. So an operation on a prompt of many
blocks touches a few nodes. Children are looked up by the tokens of their first blocks, not by a
hash of them: a hash collision is never a hit.
"""

from collections import OrderedDict

from legato.core.token_ids import token_array
from legato.kv.block_ids import BlockIds, block_array
from legato.kv.cache_events import CacheEvents
from legato.kv.dependents import Dependents
from legato.kv.host_cache_slots import HostCacheSlots
from legato.kv.prefix_node import Node, SoughtTokens, Way


class PrefixTree:
    """Full blocks by their tokens. Computed blocks stay after their last user, until evicted.

    Spilled blocks, which are in host memory only, are at the lower ends of the tree.

    Args:
        host: pool that evicted blocks go to.
        events: journal of the blocks that come and go.
        dependents: what is kept beside the blocks.

    Attributes:
        root: a node without blocks, and without users.
        num_unused: blocks that could be evicted.
    """

    def __init__(
        self,
        host: HostCacheSlots,
        events: CacheEvents | None = None,
        dependents: Dependents | None = None,
    ) -> None:
        self._host = host
        self._events = events or CacheEvents()
        self._dependents = dependents or Dependents()
        self.root = Node(None, b"", 0, token_array(()), block_array())
        self.num_unused = 0
        # Least recently used first. A request uses the whole path down to its last block and lets
        # go of the deepest node first, so a node always comes after the nodes below it: the last
        # block of the first node is a leaf, and eviction takes no search.
        self._unused: OrderedDict[Node, None] = OrderedDict()

    def match(
        self, sought: SoughtTokens, end: int, *, below: Node | None = None, known: Way | None = None
    ) -> Way:
        """Return the path of the tokens up to `end`, without using it.

        Args:
            below: node to begin below, with the tokens after it.
            known: a path that was returned for these tokens. No token is compared again on the
                part of it that is still there.
        """
        node = below or self.root
        nodes = [] if known is None else self._still_there(known, end)
        num_tokens = node.end
        if known is not None and nodes:
            node = nodes[-1]
            num_tokens = min(node.end, known.num_tokens)
        while num_tokens < end:
            if num_tokens == node.end:
                child = node.children.get(sought.key(num_tokens))
                if child is None:
                    break
                node = child
                nodes.append(node)
            num_equal = node.num_equal(sought, end, num_tokens - node.start)
            num_tokens = node.start + num_equal
            if num_equal < len(node.tokens):
                break
        return Way(nodes, num_tokens, num_cuts=node.num_cuts)

    def _still_there(self, way: Way, end: int) -> list[Node]:
        """Return the first nodes of a path, up to `end`, that have lost nothing since it was found.

        A node that is split gets another parent. A node is cut only without children, so the
        one above a lost node may have been cut, too.
        """
        nodes: list[Node] = []
        parent = self.root
        for node in way.nodes:
            if node.parent is not parent or parent.children.get(node.key) is not node:
                return nodes[:-1]
            is_cut = node is way.nodes[-1] and node.num_cuts != way.num_cuts
            if is_cut or min(node.end, way.num_tokens) > end:
                return nodes
            nodes.append(node)
            parent = node
        return nodes

    def use(self, way: Way) -> list[Node]:
        """Keep the blocks of a path in their places until they are released.

        Returns:
            the nodes that hold them now.
        """
        nodes = way.nodes
        if nodes and nodes[-1].end > way.num_tokens:
            nodes = [*nodes[:-1], self._split(nodes[-1], way.num_tokens)]
        for node in nodes:
            if not node.num_users:
                self._keep(node)
            node.num_users += 1
        return nodes

    def join(self, last: Node) -> None:
        """Add a user to a node in use, and to all nodes above it."""
        node = last
        while node.parent is not None:
            node.num_users += 1
            node = node.parent

    def extend(
        self, node: Node, sought: SoughtTokens, block_ids: BlockIds, *, num_missing: int
    ) -> Node:
        """Add blocks after the end of a node, for one of its users.

        Args:
            num_missing: tokens of each block that are to be computed: none, or all.

        Returns:
            the node that holds the blocks.
        """
        start = node.end
        tokens = sought.token_ids[start : start + len(block_ids) * sought.block_size]
        num_missing *= len(block_ids)
        if node.num_users == 1 and not node.children:
            assert num_missing or not node.num_missing, "computed after what is not"
            start = node.num_blocks
            node.tokens += tokens
            node.places += block_ids
            node.num_missing += num_missing
            self._events.stored(node, start)
            return node
        child = Node(
            node, sought.key(start), start, tokens, block_ids, num_missing=num_missing, num_users=1
        )
        node.add(child)
        self._events.stored(child)
        return child

    def note_computed(self, last: Node, num_tokens: int) -> list[Node]:
        """Record that the first `num_tokens` tokens down to the end of a node are computed.

        Returns:
            the nodes that are computed to their end since this call.
        """
        changed = last.count_computed(num_tokens)
        for node, start in changed:
            self._events.stored(node, start)
        return [node for node, _ in changed if not node.num_missing]

    def release(self, last: Node) -> list[int]:
        """Remove a user from a node, and from all nodes above it.

        Returns:
            Blocks that left the tree: not computed to their end, and awaited by no other request.
        """
        dropped: list[int] = []
        node = last
        while node.parent is not None:
            parent = node.parent
            node.num_users -= 1
            if not node.num_users:
                dropped += self._drop_missing(node)
                if node.places:
                    self._let_go(node)
                else:
                    node.leave()
            node = parent
        return dropped

    def evict(self, count: int) -> list[int]:
        """Take back the `count` least recently used unused blocks; there must be as many.

        Their contents are spilled, or forgotten.
        """
        block_ids: list[int] = []
        while len(block_ids) < count:
            node = next(iter(self._unused))
            num_blocks = min(count - len(block_ids), node.num_blocks)
            self.num_unused -= num_blocks
            if self._host.num_slots:
                block_ids += self._spill(node, num_blocks)
            else:
                block_ids += self._forget(node, num_blocks)
        return block_ids

    def forget(self) -> list[int]:
        """Forget all unused blocks, spilled ones included, and take them back."""
        self._host.forget()
        block_ids: list[int] = []
        while self._unused:
            node = next(iter(self._unused))
            self.num_unused -= node.num_blocks
            block_ids += self._forget(node, node.num_blocks)
        return block_ids

    def _forget(self, node: Node, num_blocks: int) -> BlockIds:
        """Remove the last blocks of the least recently used node."""
        forgotten = node.cut(num_blocks)
        self._dependents.gone(forgotten)
        self._events.removed(forgotten, from_host=False)
        if not node.places:
            del self._unused[node]
            node.leave()
        return forgotten

    def _spill(self, node: Node, num_blocks: int) -> BlockIds:
        """Move the last blocks of the least recently used node to host memory."""
        del self._unused[node]
        if num_blocks < node.num_blocks:
            above = node.split(node.num_blocks - num_blocks)
            self._unused[above] = None
            self._unused.move_to_end(above, last=False)
        block_ids = node.places[::-1]
        self._host.spill(node)
        return block_ids

    def _split(self, node: Node, end: int) -> Node:
        """Split off the part of a node up to a token, and return its node."""
        return node.split((end - node.start) // node.block_size)

    def _keep(self, node: Node) -> None:
        """Take a node out of the unused ones; a node just split off is not among them."""
        if node.is_spilled:
            self._host.hold(node)
        else:
            self._unused.pop(node, None)
            self.num_unused -= node.num_blocks

    def _let_go(self, node: Node) -> None:
        if node.is_spilled:
            self._host.let_go(node)
        else:
            self._unused[node] = None
            self.num_unused += node.num_blocks

    def _drop_missing(self, node: Node) -> BlockIds:
        if not node.num_missing:
            return block_array()
        return node.cut(-(-node.num_missing // node.block_size))
