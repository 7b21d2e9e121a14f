"""Which blocks hold which tokens: a radix tree of full blocks, shared by all that begin alike.

A node is one block of tokens under its parent, so that the way from the root spells all tokens from
the start of a request on, which are what its keys and values depend on. Children are looked up by
their tokens themselves: equal hashes of other tokens never pass for a hit.
"""

from collections import OrderedDict
from collections.abc import Iterable

from legato.kv.host_pool import HostPool
from legato.kv.prefix_node import Key, Node


class PrefixTree:
    """Full blocks by their tokens. Computed ones stay when their last user goes, until evicted.

    Spilled ones, which are in host memory only, are at the lower ends of the tree.

    Args:
        host: where evicted blocks go.
    """

    def __init__(self, host: HostPool) -> None:
        self._host = host
        self._root = Node(None, b"", -1, num_missing=0, num_users=0)
        # Least recently used first. A request uses the whole way down to its last block and lets
        # go of the deepest first, so that a node always stands behind those below it: the first
        # one is a leaf, and finding what to evict takes no search.
        self._unused: OrderedDict[Node, None] = OrderedDict()

    @property
    def num_unused(self) -> int:
        """Blocks that could be evicted."""
        return len(self._unused)

    def match(self, keys: Iterable[Key]) -> list[Node]:
        """The way down as far as it exists, without using it."""
        path: list[Node] = []
        node: Node | None = self._root
        for key in keys:
            assert node is not None
            node = node.child(key)
            if node is None:
                break
            path.append(node)
        return path

    def child(self, path: list[Node], key: Key) -> Node | None:
        """The node under the end of a way from the root, which may have no step yet."""
        return (path[-1] if path else self._root).child(key)

    def extend(
        self, path: list[Node], keys: Iterable[Key], block_ids: Iterable[int], *, num_missing: int
    ) -> None:
        """Put blocks, one under the other, at the end of a way, used by whoever goes this way."""
        parent = path[-1] if path else self._root
        path += parent.add_chain(keys, block_ids, num_missing=num_missing)

    def use(self, nodes: Iterable[Node]) -> None:
        """Keep nodes, and all above them, where they are until they are released."""
        for node in nodes:
            if not node.num_users:
                if node.slot >= 0:
                    self._host.hold(node)
                else:
                    del self._unused[node]
            node.num_users += 1

    def restore(self, nodes: Iterable[Node], block_ids: Iterable[int]) -> None:
        """Bring spilled nodes, which are in use, back into blocks."""
        for node, block_id in zip(nodes, block_ids, strict=True):
            self._host.restore(node, block_id)

    def release(self, path: list[Node]) -> list[int]:
        """Stop using a way from the root.

        Returns:
            Blocks that were in the tree and are not any more: those that were not computed to their
            end, and that nobody else waits for.
        """
        dropped: list[int] = []
        for node in reversed(path):
            node.num_users -= 1
            if node.num_users:
                continue
            if node.slot >= 0:
                self._host.let_go(node)
            elif not node.num_missing:
                self._unused[node] = None
            else:
                dropped.append(node.block_id)
                node.leave()
        return dropped

    def evict(self, count: int) -> list[int]:
        """Take back the `count` least recently used blocks that nobody uses; there must be as many.

        What is in them is spilled, or forgotten.
        """
        block_ids: list[int] = []
        pop, host = self._unused.popitem, self._host
        for _ in range(count):
            node, _ = pop(last=False)
            block_ids.append(node.block_id)
            lost = host.spill(node) if host.num_slots else node
            if lost is not None:
                lost.leave()
        return block_ids
