"""What must hold of blocks and of the tree whatever was done to them."""

from collections import Counter
from collections.abc import Iterable

from legato.kv.manager import KVCacheManager, _Table
from legato.kv.prefix_node import Node


def check_blocks(kv: KVCacheManager) -> None:
    """Every block is free, in the tree or one request's own; users are counted right."""
    nodes = _descendants(kv._tree._root)
    cached = [node.block_id for node in nodes if not node.is_spilled]
    own = [b for table in tables(kv) for b in table.block_ids[len(table.shared) :]]
    taken = cached + own
    assert len(taken) == len(set(taken)), "a block is in two places"
    assert len(taken) + kv._pool.num_free == kv.num_blocks, "blocks are conserved"
    _check_users(kv, nodes)
    _check_host(kv, nodes)
    _check_eviction_order(kv._tree._unused)
    _check_eviction_order(kv._host._spilled)
    for node in nodes:
        assert node.parent is not None
        assert node.parent.child(node.key) is node
        assert node.parent.is_computed or not node.is_computed, "computed after what is not"
        assert node.is_computed or node.num_users, "nobody will ever compute it"


def tables(kv: KVCacheManager) -> list[_Table]:
    """Of all requests, and of what was let go of under a step in flight."""
    return [*kv._tables.values(), *(table for _, table in kv._leaving)]


def _check_users(kv: KVCacheManager, nodes: list[Node]) -> None:
    users: Counter[Node] = Counter()
    for table in tables(kv):
        users.update(table.shared)
        parents = [kv._tree._root, *table.shared[:-1]]
        assert all(n.parent is p for n, p in zip(table.shared, parents, strict=False))
        assert table.block_ids[: len(table.shared)] == tuple(n.block_id for n in table.shared)
    for node in nodes:
        assert node.num_users == users[node], "a wrong number of users"
    unused = {node for node in nodes if not node.num_users and not node.is_spilled}
    assert unused == set(kv._tree._unused), "what nobody uses can be evicted, and nothing else"
    assert kv.num_free_blocks == kv._pool.num_free + len(unused)


def _check_host(kv: KVCacheManager, nodes: list[Node]) -> None:
    spilled = {node for node in nodes if node.is_spilled}
    assert spilled == set(kv._host._spilled), "what is spilled is used by nobody"
    taken = [node.slot for node in spilled] + kv._host._free
    assert sorted(taken) == list(range(len(taken))), "slots are conserved"
    for node in spilled:
        assert node.is_computed
        assert node.block_id == -1
        assert all(child.is_spilled for child in node.children)


def _check_eviction_order(order: Iterable[Node]) -> None:
    place = {node: i for i, node in enumerate(order)}
    for node in place:
        assert all(place.get(child, -1) < place[node] for child in node.children)


def _descendants(node: Node) -> list[Node]:
    found: list[Node] = []
    for child in node.children:
        found += [child, *_descendants(child)]
    return found
