"""Invariants of blocks and of the tree after any operations."""

from collections import Counter
from collections.abc import Iterable

from legato.core.plan import FIRST_STATE, ZERO_STATE
from legato.kv.block_tables import BlockTable
from legato.kv.manager import KVCacheManager
from legato.kv.prefix_node import Node
from legato.kv.spilled_copies import SpilledCopies


def check_blocks(kv: KVCacheManager) -> None:
    """Every block is free, in the tree or one request's own; users are counted right."""
    nodes = _descendants(kv._tree.root)
    cached = [b for node in nodes if not node.is_spilled for b in node.places]
    own = [b for table in tables(kv) for b in table.block_ids[table.num_shared :]]
    quarantined = [b for block_ids in kv.quarantine for b in block_ids]
    taken = cached + own + quarantined
    assert len(taken) == len(set(taken)), "a block is in two places"
    assert len(taken) + kv._pool.num_free == kv.num_blocks, "blocks are conserved"
    _check_users(kv, nodes)
    _check_arriving(kv)
    _check_host(kv, nodes)
    keys = {key for node in nodes for key in node.block_keys()}
    _check_windows(kv, keys)
    _check_states(kv, keys)
    _check_eviction_order(kv._tree._unused)
    _check_eviction_order(kv._host._spilled)
    for node in nodes:
        assert node.parent is not None
        assert node.parent.children[node.key] is node
        assert node.start == node.parent.end
        assert len(node.tokens) == node.num_blocks * kv.block_size > 0
        assert 0 <= node.num_missing <= len(node.tokens)
        is_begun = node.num_missing < len(node.tokens)
        assert not (node.parent.num_missing and is_begun), "computed after what is not"
        assert not node.num_missing or node.num_users, "nobody will ever compute it"


def _check_states(kv: KVCacheManager, in_tree: set[int]) -> None:
    """Every slot is free, one request's own or a checkpoint, whose users are counted right."""
    states = kv.states
    if states is None:
        return
    lines, kept = states._lines, states.checkpoints._checkpoints
    assert lines.keys() == kv._tables._tables.keys()
    assert len(lines) + states.num_free == states.num_requests
    own = [line.current for line in lines.values() if line.checkpoint is None]
    own = [slot for slot in own if slot != ZERO_STATE]
    own += [slot for line in lines.values() for slots in line.written for slot in slots]
    assert not any(line.passed for line in lines.values()), "kept when its step has landed"
    received = [one for one in kv.handovers if one.checkpoint is None]
    own += [one.slot for one in received if one.slot is not None]
    here = [checkpoint for checkpoint in kept.values() if checkpoint.slot is not None]
    taken = own + states._free + [checkpoint.slot for checkpoint in here]
    assert sorted(taken) == list(range(FIRST_STATE, states.num_slots)), "slots are conserved"
    for line in lines.values():
        assert len(line.written) < states.slots_per_request
        if line.checkpoint is not None:
            assert line.current == line.checkpoint.slot
            assert kept[line.checkpoint.key] is line.checkpoint
    assert kept.keys() <= in_tree, "a checkpoint of a block that has left the tree"
    users = Counter(line.checkpoint for line in lines.values())
    users.update(handover.checkpoint for handover in kv.handovers)
    entries = {entry: one for _, entry, one in states.checkpoints._least if one.entry == entry}
    for key, checkpoint in kept.items():
        assert checkpoint.key == key
        assert checkpoint.num_users == users[checkpoint]
        can_be_evicted = checkpoint.slot is not None and not checkpoint.num_users
        assert (checkpoint.entry is not None) is can_be_evicted
    spilled = {key for key, one in kept.items() if one.slot is None}
    assert spilled == set(states.checkpoints.spilled._slots)
    assert not any(kept[key].num_users for key in spilled), "a step reads it"
    _check_spilled(states.checkpoints.spilled)
    unused = {one.entry: one for one in here if not one.num_users}
    assert entries == unused, "what nobody uses can be evicted, and nothing else"


def tables(kv: KVCacheManager) -> list[BlockTable]:
    """Blocks of requests and transfers, and blocks that were let go under a step in flight."""
    return [*kv._tables, *(handover.table for handover in kv.handovers)]


def _check_users(kv: KVCacheManager, nodes: list[Node]) -> None:
    users: Counter[Node] = Counter()
    for hold in kv.holds:
        way = _way(hold.last)
        users.update(way)
        assert hold.block_ids.tolist() == [b for n in way for b in n.places]
    for table in tables(kv):
        way = _way(table.last)
        users.update(way)
        assert table.num_shared * kv.block_size == table.last.end
        assert table.block_ids[: table.num_shared].tolist() == [b for n in way for b in n.places]
    for node in nodes:
        assert node.num_users == users[node], "a wrong number of users"
    unused = {node for node in nodes if not node.num_users and not node.is_spilled}
    assert unused == set(kv._tree._unused), "what nobody uses can be evicted, and nothing else"
    num_unused = sum(node.num_blocks for node in unused)
    assert kv.num_free_blocks == kv._pool.num_free + num_unused


def _check_arriving(kv: KVCacheManager) -> None:
    """Only what is held for a transfer, and does not count as computed yet."""
    arriving: set[int] = set()
    for hold in kv.holds:
        assert hold.start <= hold.num_arrived <= hold.end
        end = hold.num_arrived if hold.is_over else hold.end
        num_done = hold.num_computed_tokens // kv.block_size * kv.block_size
        arriving.update(hold.blocks(max(hold.start, num_done), end))
        if hold.num_arrived > hold.start and not hold.is_settled:
            assert hold.base.num_missing, "all tokens before what arrived are computed"
            assert hold in kv.holds._unsettled[hold.base]
    assert arriving == kv.holds._arriving
    unsettled = [hold for holds in kv.holds._unsettled.values() for hold in holds]
    assert set(unsettled) <= set(kv.holds)
    for node in _descendants(kv._tree.root):
        assert node.is_fetched or node.is_spilled or arriving.isdisjoint(node.places)


def _check_host(kv: KVCacheManager, nodes: list[Node]) -> None:
    spilled = {node for node in nodes if node.is_spilled}
    assert spilled == set(kv._host._spilled), "what is spilled is used by nobody"
    taken = [slot for node in spilled for slot in node.places] + kv._host._free
    assert sorted(taken) == list(range(len(taken))), "slots are conserved"
    for node in spilled:
        assert not node.num_missing
        assert all(child.is_spilled for child in node.children.values())


def _check_windows(kv: KVCacheManager, in_tree: set[int]) -> None:
    """Each block of a window group is free, cached or one request's own."""
    if kv.windows is None:
        return
    for i, group in enumerate(kv.windows.groups):
        leaving = [b for _, blocks in kv.windows._leaving for b in blocks[i]]
        used = Counter(b for t in group._tables.values() for b in t.block_ids[t.first :])
        used.update(leaving)
        used.update(b for handover in kv.handovers for b in handover.windows[i])
        cached = set(group._cached.values())
        own = [b for b in used if b not in cached]
        assert all(used[b] == 1 for b in own), "a block that is not cached has two users"
        assert len(own) + len(cached) + group._pool.num_free == group.num_blocks
        assert {b: used[b] for b in cached} == group._num_users
        assert {b for b in cached if not used[b]} == set(group._unused) | set(group._passed)
        assert not set(group._unused) & set(group._passed)
        assert group._worth_keeping <= cached
        assert {key: b for b, key in group._key_of.items()} == group._cached
        spilled = set(group.spilled._slots)
        assert set(group._cached) | spilled <= in_tree, "a copy of a block that has left the tree"
        assert spilled.isdisjoint(group._cached), "a block has two copies"
        _check_spilled(group.spilled)
        assert group.num_free_blocks == group._pool.num_free + group.num_cached_blocks


def _check_spilled(spilled: SpilledCopies) -> None:
    slots = [*spilled._slots.values(), *spilled._free]
    assert sorted(slots) == list(range(spilled.num_slots)), "slots of host memory are conserved"


def _check_eviction_order(order: Iterable[Node]) -> None:
    place = {node: i for i, node in enumerate(order)}
    for node in place:
        assert all(place.get(child, -1) < place[node] for child in node.children.values())


def _way(last: Node) -> list[Node]:
    """The nodes from the root down to one, but for the root."""
    return [*_way(last.parent), last] if last.parent is not None else []


def _descendants(node: Node) -> list[Node]:
    found: list[Node] = []
    for child in node.children.values():
        found += [child, *_descendants(child)]
    return found
