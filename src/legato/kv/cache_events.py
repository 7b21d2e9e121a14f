"""Tells what becomes of the blocks of the tree, by names that routers know."""

from collections.abc import Iterable, Iterator

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


class CacheEvents:
    """A journal of the tree, kept once somebody watches.

    Blocks are known by where they lie. One whose parent's hash is not known has none itself: that
    leaves out all that is below a salt.
    """

    def __init__(self) -> None:
        self._is_watched = False
        self._events: list[KVEvent] = []
        # Key where the block lies, in either medium.
        self._hashes: dict[Medium, dict[int, BlockHash]] = {DEVICE: {}, HOST: {}}

    def watch(self, root: Node) -> None:
        """Begin, or begin anew: with all that there is."""
        self._is_watched = True
        self._events = [AllBlocksCleared()]
        for hashes in self._hashes.values():
            hashes.clear()
        for node in _below(root):
            self.stored(node)

    def take(self) -> list[KVEvent]:
        """What has been told since the last time."""
        events, self._events = self._events, []
        return events

    def stored(self, node: Node, start: int = 0) -> None:
        """The blocks of a node that are computed, from its `start`th on, are where they are."""
        end = node.num_computed_blocks
        if not self._is_watched or start >= end:
            return
        parent = self._hash_before(node, start)
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


def _below(root: Node) -> Iterator[Node]:
    """All nodes, each behind its parent."""
    waiting = list(root.children.values())
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children.values()
