"""Reports changes of the tree's blocks as events, by hashes that routers know."""

from bisect import bisect_left
from collections.abc import Iterable

from legato.core.block_hash import BlockHash, block_hash
from legato.core.cache_salt import hash_root
from legato.core.kv_events import (
    DEVICE,
    HOST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    HitEnds,
    KVEvent,
    Medium,
)
from legato.kv.path_ends import PathEnds
from legato.kv.prefix_node import Node, is_host_key, place_of

_MOST_CAUGHT_UP = 128
"""Most blocks cached before the watch that one `take` reports: each takes ten microseconds."""


class CacheEvents:
    """A journal of the tree, kept while it is watched.

    Blocks are known by their places. A block whose parent has no known hash has none either, which
    leaves out all blocks below a client's salt; those of a tenant have a root of their own. Blocks
    cached before the watch are reported in pieces, from the root on. Until then, new blocks below
    them are left out, and are reported with them.

    Args:
        ends: where hits may end on reported paths; None if they may after any block.

    Attributes:
        is_watched: whether the watch has begun; there are no events before.
    """

    def __init__(self, ends: PathEnds | None = None) -> None:
        self._ends = ends
        self.is_watched = False
        self._events: list[KVEvent] = []
        # Key the block's place in the medium.
        self._hashes: dict[Medium, dict[int, BlockHash]] = {DEVICE: {}, HOST: {}}
        # Nodes whose blocks, and those below them, are still to be reported; the last goes first.
        self._untold: dict[Node, None] = {}

    @property
    def has_untold(self) -> bool:
        """Whether blocks that were cached when the watch began are still to be reported."""
        return bool(self._untold)

    def watch(self, root: Node) -> None:
        """Begin the watch, or begin it anew, with all cached blocks."""
        self.is_watched = True
        self._events = [AllBlocksCleared()]
        if self._ends is not None:
            self._events.append(HitEnds())
            self._ends.clear()
        for hashes in self._hashes.values():
            hashes.clear()
        self._untold = dict.fromkeys(root.children.values())

    def take(self) -> list[KVEvent]:
        """Return the events since the last call, and some for blocks still to be reported."""
        room = _MOST_CAUGHT_UP
        while self._untold and room > 0:
            room -= self._catch_up(room)
        if self._ends is not None:
            self._tell_ends(*self._ends.take())
        events, self._events = self._events, []
        return events

    def stored(self, node: Node, start: int = 0) -> None:
        """Report a node's computed blocks, from its `start`th on, as stored in their places."""
        if self.is_watched:
            self._tell(node, start, node.num_computed_blocks)

    def _tell(self, node: Node, start: int, end: int) -> None:
        parent = self._hash_before(node, start) if start < end else None
        if parent is None:
            return
        medium, size = _medium(node), node.block_size
        tokens = node.tokens[start * size : end * size]
        is_first = not start and node.parent is not None and node.parent.parent is None
        first, hashes = parent, []
        for i in range(end - start):
            parent = block_hash(parent, tokens[i * size : (i + 1) * size])
            hashes.append(parent)
        self._hashes[medium].update(zip(node.places[start:end], hashes, strict=True))
        self._events.append(
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=None if is_first else first,
                token_ids=tokens.tolist(),
                block_size=size,
                medium=medium,
            )
        )
        if self._ends is not None:
            parents = [first, *hashes[:-1]]
            keys = node.block_keys(start, end)
            for name, parent, key in zip(hashes, parents, keys, strict=True):
                self._ends.put(name, parent, key)

    def ends_changed(self, key: int) -> None:
        """Note that something beside a block has come or gone, on which ends of hits depend."""
        if self.is_watched and self._ends is not None:
            name = self._hashes[HOST if is_host_key(key) else DEVICE].get(place_of(key))
            if name is not None:
                self._ends.change(name)

    def removed(self, places: Iterable[int], *, from_host: bool, is_moved: bool = False) -> None:
        """Report blocks as removed from their places; skip blocks that were never reported.

        Args:
            is_moved: whether they are about to be stored elsewhere.
        """
        if not self.is_watched:
            return
        medium = HOST if from_host else DEVICE
        known = self._hashes[medium]
        hashes = [known.pop(place) for place in places if place in known]
        if self._ends is not None and not is_moved:
            self._tell_ends([], self._ends.remove(hashes))
        if hashes:
            self._events.append(BlockRemoved(block_hashes=hashes, medium=medium))

    def _tell_ends(self, added: list[BlockHash], removed: list[BlockHash]) -> None:
        if added or removed:
            self._events.append(HitEnds(added=added, removed=removed))

    def _catch_up(self, most: int) -> int:
        """Report up to `most` blocks of the next untold node; return their number, at least 1."""
        node = next(reversed(self._untold))
        known = self._hashes[_medium(node)]
        end = node.num_computed_blocks if node.places else 0
        start = bisect_left(range(end), True, key=lambda i: node.places[i] not in known)
        stop = min(end, start + most)
        above = node.parent
        assert above is not None
        # A node that was split may be left without a computed block, below blocks that have some.
        is_next = start < stop or self._lacks_hashes(above)
        if is_next and self._hash_before(node, start) is None:
            del self._untold[node]
            if above.parent is not None:
                # The node was split. It comes again after the blocks above it.
                self._untold[above] = None
            return 1
        self._tell(node, start, stop)
        if stop == end:
            del self._untold[node]
            self._untold.update(dict.fromkeys(node.children.values()))
        return max(1, stop - start)

    def _lacks_hashes(self, node: Node) -> bool:
        """Whether a node has computed blocks, and the last one was not reported."""
        end = node.num_computed_blocks if node.places and node.parent is not None else 0
        return end > 0 and node.places[end - 1] not in self._hashes[_medium(node)]

    def _hash_before(self, node: Node, start: int) -> BlockHash | None:
        if start:
            return self._hashes[_medium(node)].get(node.places[start - 1])
        above = node.parent
        assert above is not None
        if above.parent is None:
            return hash_root(node.salt)
        return self._hashes[_medium(above)].get(above.places[-1])


def _medium(node: Node) -> Medium:
    return HOST if node.is_spilled else DEVICE
