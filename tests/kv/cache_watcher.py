"""A router's view of one cache, made of events alone, and what is really there."""

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
from legato.kv.manager import KVCacheManager
from legato.kv.prefix_node import Node

Prompts = set[tuple[Medium, tuple[int, ...]]]
"""Of each block that is cached: where it lies, and all tokens up to its end."""


class CacheWatcher:
    """Attributes: `is_watching`: whether it has been told how the cache was to begin with."""

    def __init__(self) -> None:
        self.is_watching = False
        self._tokens: dict[BlockHash, tuple[int, ...]] = {}  # up to the end of the block
        self._stored: set[tuple[Medium, BlockHash]] = set()

    def take(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            match event:
                case AllBlocksCleared():
                    self.is_watching = True
                    self._stored.clear()
                case BlockStored():
                    self._take_stored(event)
                case BlockRemoved(block_hashes=hashes, medium=medium):
                    for name in hashes:
                        self._stored.remove((medium, name))

    @property
    def hashes(self) -> set[BlockHash]:
        """Of all blocks, wherever they lie."""
        return {name for _, name in self._stored}

    def prompts(self) -> Prompts:
        return {(medium, self._tokens[name]) for medium, name in self._stored}

    def _take_stored(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes) > 0
        before = () if parent is None else self._tokens[parent]
        for i, name in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[i * size : (i + 1) * size])
            assert name == block_hash(parent or ROOT, tokens)
            before += tokens
            parent = name
            assert (event.medium, name) not in self._stored, "told of twice"
            self._tokens[name] = before
            self._stored.add((event.medium, name))


def cached_prompts(kv: KVCacheManager) -> Prompts:
    """What the tree has, but for what is salted."""
    first = kv._tree.root.children.values()
    unsalted = [node for node in first if len(node.key) == 4 * kv.block_size]
    return {prompt for node in unsalted for prompt in _prompts(node, (), kv.block_size)}


def _prompts(
    node: Node, before: tuple[int, ...], size: int
) -> Iterator[tuple[Medium, tuple[int, ...]]]:
    num_computed = len(node.tokens) - node.num_missing
    for end in range(size, num_computed + 1, size):
        yield (HOST if node.is_spilled else DEVICE), before + tuple(node.tokens[:end])
    for child in node.children.values():
        yield from _prompts(child, before + tuple(node.tokens), size)
