"""Mirrors the cache's contents from its events, so that reading them delays no step."""

from collections.abc import Iterator
from typing import NamedTuple, get_args

from legato.core.block_hash import BlockHash
from legato.core.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
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
    """The blocks of one cache."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[Medium, BlockHash], _Block] = {}

    def note(self, event: KVEvent) -> None:
        """Apply the next event."""
        match event:
            case BlockStored():
                self._store(event)
            case BlockRemoved(block_hashes=hashes, medium=medium):
                for name in hashes:
                    self._blocks.pop((medium, name), None)
            case AllBlocksCleared():
                self._blocks.clear()

    def told_anew(self) -> Iterator[KVEvent]:
        """Yield events that describe the whole cache, each block after its parent."""
        yield AllBlocksCleared()
        for (medium, name), block in sorted(self._blocks.items(), key=lambda item: item[1].depth):
            yield BlockStored(
                block_hashes=[name],
                parent_block_hash=block.parent,
                token_ids=block.token_ids,
                block_size=len(block.token_ids),
                medium=medium,
            )

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        depth = 0 if parent is None else self._depth(parent) + 1
        for i, name in enumerate(event.block_hashes):
            tokens = event.token_ids[i * size : (i + 1) * size]
            self._blocks[event.medium, name] = _Block(depth + i, parent, tokens)
            parent = name

    def _depth(self, name: BlockHash) -> int:
        found = (self._blocks.get((medium, name)) for medium in _MEDIA)
        return next(block.depth for block in found if block is not None)
