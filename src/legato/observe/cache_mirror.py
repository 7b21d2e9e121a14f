"""The blocks of one cache by its events, as routers of other projects are to see them.

A router that knows only blocks expects a hit on all blocks that a prompt shares with the cache.
With recurrent layers a hit ends at a checkpoint, and with sliding windows where each window finds
its last blocks (`HitEnds`). Blocks after the last such end on their path are of no use. So a block
is published only while it, or a block after it, is an end. A prompt that leaves a published path
before its end still finds less than the router expects.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, get_args

from legato.core.block_hash import BlockHash
from legato.core.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    HitEnds,
    KVEvent,
    Medium,
)

_MEDIA: tuple[Medium, ...] = get_args(Medium)


class _Block(NamedTuple):
    """Attributes: `depth`: number of blocks before it in its prompt."""

    depth: int
    parent: BlockHash | None
    token_ids: list[int]


class CacheMirror:
    """Keeps the whole cache, so that reading it delays no step."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[Medium, BlockHash], _Block] = {}
        self._ends: set[BlockHash] | None = None  # None if hits end after any block
        # With ends: key a published block, value 1 if it is an end, and 1 for each published child.
        self._reasons: dict[BlockHash, int] = {}

    def note(self, event: KVEvent) -> list[KVEvent]:
        """Apply the next event; return what follows from it for other routers."""
        match event:
            case BlockStored():
                self._store(event)
                return [event] if self._ends is None else self._stored(event.block_hashes)
            case BlockRemoved(block_hashes=hashes, medium=medium):
                for name in hashes:
                    self._blocks.pop((medium, name), None)
                published = [name for name in hashes if self._is_published(name)]
                return [BlockRemoved(block_hashes=published, medium=medium)] if published else []
            case HitEnds(added=added, removed=removed):
                return self._change_ends(added, removed)
            case AllBlocksCleared():
                self._blocks.clear()
                self._reasons.clear()
                self._ends = None
                return [event]

    def snapshot(self) -> Iterator[KVEvent]:
        """Yield events that describe all published blocks, each after its parent."""
        yield AllBlocksCleared()
        blocks = self._blocks.items()
        for (medium, name), block in sorted(blocks, key=lambda item: item[1].depth):
            if self._is_published(name):
                yield _event(medium, [(name, block)])

    def _is_published(self, name: BlockHash) -> bool:
        return self._ends is None or name in self._reasons

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        depth = 0 if parent is None else self._block(parent)[1].depth + 1
        for i, name in enumerate(event.block_hashes):
            tokens = event.token_ids[i * size : (i + 1) * size]
            self._blocks[event.medium, name] = _Block(depth + i, parent, tokens)
            parent = name

    def _change_ends(
        self, added: Iterable[BlockHash], removed: Iterable[BlockHash]
    ) -> list[KVEvent]:
        if self._ends is None:
            self._ends = set()
        come = [name for name in added if name not in self._ends]
        gone = [name for name in removed if name in self._ends]
        self._ends.update(come)
        self._ends.difference_update(gone)
        stored = [published for name in come for published in self._need(name)]
        dropped = [published for name in gone for published in self._need_no_longer(name)]
        return [*self._stored(stored), *self._removed(dropped)]

    def _need(self, end: BlockHash) -> list[BlockHash]:
        """Count a reason to publish a block; return the blocks published now, in order."""
        published: list[BlockHash] = []
        name: BlockHash | None = end
        while name is not None:
            self._reasons[name] = self._reasons.get(name, 0) + 1
            if self._reasons[name] > 1:
                break
            published.append(name)
            name = self._block(name)[1].parent
        return published[::-1]

    def _need_no_longer(self, end: BlockHash) -> list[BlockHash]:
        """Undo `_need`; return the blocks published no more, the last one first."""
        dropped: list[BlockHash] = []
        name: BlockHash | None = end
        while name is not None:
            self._reasons[name] -= 1
            if self._reasons[name]:
                break
            del self._reasons[name]
            dropped.append(name)
            name = self._block(name)[1].parent
        return dropped

    def _stored(self, names: Sequence[BlockHash]) -> list[KVEvent]:
        """Return the events of those blocks that are published, which follow each other."""
        events: list[KVEvent] = []
        run: list[tuple[BlockHash, _Block]] = []
        run_medium = _MEDIA[0]
        for name in names:
            if name not in self._reasons:
                continue
            medium, block = self._block(name)
            if run and (medium != run_medium or block.parent != run[-1][0]):
                events.append(_event(run_medium, run))
                run = []
            run_medium = medium
            run.append((name, block))
        return [*events, _event(run_medium, run)] if run else events

    def _removed(self, names: Sequence[BlockHash]) -> list[KVEvent]:
        places = [(self._block(name)[0], name) for name in names]
        by_medium = ((medium, [n for m, n in places if m == medium]) for medium in _MEDIA)
        return [BlockRemoved(block_hashes=gone, medium=m) for m, gone in by_medium if gone]

    def _block(self, name: BlockHash) -> tuple[Medium, _Block]:
        found = ((medium, self._blocks.get((medium, name))) for medium in _MEDIA)
        return next((medium, block) for medium, block in found if block is not None)


def _event(medium: Medium, blocks: Sequence[tuple[BlockHash, _Block]]) -> BlockStored:
    return BlockStored(
        block_hashes=[name for name, _ in blocks],
        parent_block_hash=blocks[0][1].parent,
        token_ids=[token for _, block in blocks for token in block.token_ids],
        block_size=len(blocks[0][1].token_ids),
        medium=medium,
    )
