"""Tells what becomes of the blocks of the tree, by names that routers know."""

from bisect import bisect_left
from collections.abc import Iterable

from legato.core.block_hash import ROOT, BlockHash, block_hash
from legato.core.kv_events import (
    DEVICE,
    HOST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    Medium,
)
from legato.kv.prefix_node import Node

_MOST_CAUGHT_UP = 128
"""Blocks of those that were cached before that one `take` tells: one takes ten microseconds."""


class CacheEvents:
    """A journal of the tree, kept once it is watched.

    Blocks are known by where they lie. One whose parent's hash is not known has none itself: that
    leaves out all that is below a salt. What was cached before is told in pieces, from the root
    on; until it is, what is stored below it is left out, too, and comes with it.
    """

    def __init__(self) -> None:
        self._is_watched = False
        self._events: list[KVEvent] = []
        # Key where the block lies, in either medium.
        self._hashes: dict[Medium, dict[int, BlockHash]] = {DEVICE: {}, HOST: {}}
        # Nodes with blocks that are still to be told, and nodes below them; the last comes first.
        self._untold: dict[Node, None] = {}

    @property
    def has_untold(self) -> bool:
        """Whether blocks are still to be told that were cached when the watch began."""
        return bool(self._untold)

    def watch(self, root: Node) -> None:
        """Begin, or begin anew, with all that is cached."""
        self._is_watched = True
        self._events = [AllBlocksCleared()]
        for hashes in self._hashes.values():
            hashes.clear()
        self._untold = dict.fromkeys(root.children.values())

    def take(self) -> list[KVEvent]:
        """Return the events since the last time, and some for blocks that are still to be told."""
        room = _MOST_CAUGHT_UP
        while self._untold and room > 0:
            room -= self._catch_up(room)
        events, self._events = self._events, []
        return events

    def stored(self, node: Node, start: int = 0) -> None:
        """The blocks of a node that are computed, from its `start`th on, are where they are."""
        if self._is_watched:
            self._tell(node, start, node.num_computed_blocks)

    def _tell(self, node: Node, start: int, end: int) -> None:
        parent = self._hash_before(node, start) if start < end else None
        if parent is None:
            return
        medium, size = _medium(node), node.block_size
        tokens = node.tokens[start * size : end * size]
        first, hashes = parent, []
        for i in range(end - start):
            parent = block_hash(parent, tokens[i * size : (i + 1) * size])
            hashes.append(parent)
        self._hashes[medium].update(zip(node.places[start:end], hashes, strict=True))
        self._events.append(
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=None if first == ROOT else first,
                token_ids=tokens.tolist(),
                block_size=size,
                medium=medium,
            )
        )

    def removed(self, places: Iterable[int], *, from_host: bool) -> None:
        """What was there is not any more; blocks that were not told of are passed over."""
        if not self._is_watched:
            return
        medium = HOST if from_host else DEVICE
        known = self._hashes[medium]
        hashes = [known.pop(place) for place in places if place in known]
        if hashes:
            self._events.append(BlockRemoved(block_hashes=hashes, medium=medium))

    def _catch_up(self, most: int) -> int:
        """Tell up to `most` blocks of the next untold node; returns their number, at least 1."""
        node = next(reversed(self._untold))
        known = self._hashes[_medium(node)]
        end = node.num_computed_blocks if node.places else 0
        start = bisect_left(range(end), True, key=lambda i: node.places[i] not in known)
        stop = min(end, start + most)
        if start < stop and self._hash_before(node, start) is None:
            del self._untold[node]
            assert node.parent is not None
            if node.parent.parent is not None:
                # It has been split. With the blocks above it, it comes again.
                self._untold[node.parent] = None
            return 1
        self._tell(node, start, stop)
        if stop == end:
            del self._untold[node]
            self._untold.update(dict.fromkeys(node.children.values()))
        return max(1, stop - start)

    def _hash_before(self, node: Node, start: int) -> BlockHash | None:
        if start:
            return self._hashes[_medium(node)].get(node.places[start - 1])
        above = node.parent
        assert above is not None
        if above.parent is None:
            return None if node.is_salted else ROOT
        return self._hashes[_medium(above)].get(above.places[-1])


def _medium(node: Node) -> Medium:
    return HOST if node.is_spilled else DEVICE
