"""Where on reported paths of the tree a hit may end, in a cache with windows or states.

A hit needs something beside its last blocks: a copy of each block that a window reaches, and the
last block's checkpoint. Paths are followed by the blocks' hashes, which stay the same where nodes
are split and blocks move.
"""

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from legato.core.block_hash import ROOT, BlockHash


class Reach(NamedTuple):
    """What a hit needs of one window group, or of the states.

    Attributes:
        num_blocks: blocks before the end of a hit that must have something there.
        kept: keys of the blocks that have.
    """

    num_blocks: int
    kept: Container[int]


class _Block:
    """A reported block.

    Attributes:
        runs: for each reach, the blocks in a row that have something there, up to this one. No more
            are counted than the reach needs, and the start of a prompt counts as so many.
    """

    __slots__ = ("children", "key", "name", "parent", "runs")

    def __init__(self, name: BlockHash, parent: "_Block | None", key: int) -> None:
        self.name = name
        self.parent = parent
        self.key = key
        self.runs: tuple[int, ...] = ()
        self.children: set[_Block] = set()


class PathEnds:
    """Follows changes of a path no further than a reach goes, and several changes at a time.

    Args:
        reaches: all must find their blocks; there is at least one.
    """

    def __init__(self, reaches: Sequence[Reach]) -> None:
        self._reaches = tuple(reaches)
        self._full = tuple(reach.num_blocks for reach in reaches)
        self.clear()

    def clear(self) -> None:
        """Forget all blocks."""
        root = _Block(ROOT, None, -1)
        root.runs = self._full
        self._blocks = {ROOT: root}  # key the block's hash
        self._changed: dict[_Block, None] = {}  # since the last `take`
        self._ends: set[BlockHash] = set()

    def put(self, name: BlockHash, parent: BlockHash, key: int) -> None:
        """Add a block after its parent, or record its other key."""
        block = self._blocks.get(name)
        if block is not None:
            block.key = key
            return
        above = self._blocks[parent]
        block = self._blocks[name] = _Block(name, above, key)
        above.children.add(block)
        self._changed[block] = None

    def change(self, name: BlockHash) -> None:
        """Record that something beside a block has come or gone."""
        self._changed[self._blocks[name]] = None

    def remove(self, names: Iterable[BlockHash]) -> list[BlockHash]:
        """Forget blocks that leave the cache; return the ends among them, as of the last `take`."""
        ends: list[BlockHash] = []
        for name in names:
            block = self._blocks.pop(name)
            self._changed.pop(block, None)
            assert block.parent is not None
            block.parent.children.remove(block)
            if name in self._ends:
                self._ends.remove(name)
                ends.append(name)
        return ends

    def take(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """Return the new ends since the last call, and the former ones."""
        touched: dict[_Block, None] = {}
        for block in self._changed:
            below = [block]
            while below:
                block = below.pop()
                runs = self._runs(block)
                if runs != block.runs:
                    block.runs = runs
                    touched[block] = None
                    below += block.children
        self._changed.clear()
        come: list[BlockHash] = []
        gone: list[BlockHash] = []
        for name, is_end in ((block.name, block.runs == self._full) for block in touched):
            if is_end != (name in self._ends):
                (come if is_end else gone).append(name)
        self._ends.update(come)
        self._ends.difference_update(gone)
        return come, gone

    def _runs(self, block: _Block) -> tuple[int, ...]:
        assert block.parent is not None
        return tuple(
            min(run + 1, reach.num_blocks) if block.key in reach.kept else 0
            for run, reach in zip(block.parent.runs, self._reaches, strict=True)
        )
