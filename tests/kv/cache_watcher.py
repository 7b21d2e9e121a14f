"""A router's view of one cache, made of events alone, and what is really there."""

from collections.abc import Iterable, Iterator

from legato.core.block_hash import ROOT, BlockHash, block_hash
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
from legato.kv.manager import KVCacheManager
from legato.kv.prefix_node import Node
from legato.observe.cache_mirror import CacheMirror

Prompts = set[tuple[Medium, tuple[int, ...]]]
"""Of each block that is cached: where it lies, and all tokens up to its end."""


class CacheWatcher:
    """Attributes:
    is_watching: whether it has been told how the cache was to begin with.
    has_ends: whether it has been told that hits end at certain blocks alone.
    """

    def __init__(self) -> None:
        self.is_watching = self.has_ends = False
        self._ends: set[BlockHash] = set()
        self._tokens: dict[BlockHash, tuple[int, ...]] = {}  # up to the end of the block
        self._stored: set[tuple[Medium, BlockHash]] = set()

    def take(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            match event:
                case AllBlocksCleared():
                    self.is_watching = True
                    self.has_ends = False
                    self._stored.clear()
                    self._ends.clear()
                case HitEnds(added=added, removed=removed):
                    self.has_ends = True
                    assert self._ends.isdisjoint(added), "told of twice"
                    assert self.hashes.issuperset([*added, *removed]), "an end of no block"
                    self._ends.update(added)
                    for name in removed:
                        self._ends.remove(name)
                case BlockStored():
                    self._take_stored(event)
                case BlockRemoved(block_hashes=hashes, medium=medium):
                    for name in hashes:
                        self._stored.remove((medium, name))

    @property
    def hashes(self) -> set[BlockHash]:
        """The keys and values of every block."""
        return {name for _, name in self._stored}

    def ends(self) -> set[tuple[int, ...]]:
        """All tokens up to each end of a hit."""
        return {self._tokens[name] for name in self._ends}

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


class Routers:
    """Two routers that follow the events of a cache.

    Attributes:
        own: Legato's router, which understands events about the ends of hits.
        other: another project's router, which gets events about blocks alone.
    """

    def __init__(self) -> None:
        self.own, self.other = CacheWatcher(), CacheWatcher()
        self._mirror = CacheMirror()

    def take(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            self.own.take([event])
            self.other.take(self._mirror.note(event))

    def check(self, kv: KVCacheManager) -> None:
        """Check that each router knows the blocks that it can use.

        Legato's router knows all blocks. Another project's router knows each block before an end
        of a hit, and so does a router that joins now.
        """
        assert self.own.has_ends
        assert not self.other.has_ends, "a router of another project does not know of them"
        ends, prompts = self.own.ends(), cached_prompts(kv)
        assert self.own.prompts() == prompts
        assert self.other.prompts() == {
            (medium, tokens)
            for medium, tokens in prompts
            if any(end[: len(tokens)] == tokens for end in ends)
        }
        anew = CacheWatcher()
        anew.take(self._mirror.snapshot())
        assert anew.prompts() == self.other.prompts()


def cached_prompts(kv: KVCacheManager) -> Prompts:
    """What the tree has, but for what is salted."""
    return {(medium, tokens) for medium, tokens, _ in _blocks(kv)}


def cached_ends(kv: KVCacheManager) -> set[tuple[int, ...]]:
    """All tokens up to each checkpoint, but for what is salted."""
    assert kv.states is not None
    kept = kv.states.checkpoints
    return {tokens for _, tokens, key in _blocks(kv) if key in kept}


def _blocks(kv: KVCacheManager) -> Iterator[tuple[Medium, tuple[int, ...], int]]:
    """Of each block that is not salted: where it lies, all tokens up to its end, and its key."""
    for node in kv._tree.root.children.values():
        if len(node.key) == 4 * kv.block_size:
            yield from _blocks_from(node, (), kv.block_size)


def _blocks_from(
    node: Node, before: tuple[int, ...], size: int
) -> Iterator[tuple[Medium, tuple[int, ...], int]]:
    medium = HOST if node.is_spilled else DEVICE
    for i, key in enumerate(node.block_keys(0, node.num_computed_blocks), 1):
        yield medium, before + tuple(node.tokens[: i * size]), key
    for child in node.children.values():
        yield from _blocks_from(child, before + tuple(node.tokens), size)
