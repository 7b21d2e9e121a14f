"""The memory of a cache's blocks, for copies between caches."""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Spans = npt.NDArray[np.uint64]
"""[N, 3]: address here, address there, bytes."""


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """Planes of blocks, one after the other: keys of layer 0, values of layer 0, and so on.

    Attributes:
        block_bytes: bytes of a block in one plane.
    """

    address: int
    num_planes: int
    num_blocks: int
    block_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_planes * self.num_blocks * self.block_bytes

    def spans(self, blocks: Sequence[int], other: "Region", other_blocks: Sequence[int]) -> Spans:
        """Return the spans that copy `other_blocks` of another region to `blocks` of this one.

        Blocks that are adjacent in both are one span of each plane.
        """
        here, there = np.asarray(blocks, np.int64), np.asarray(other_blocks, np.int64)
        breaks = np.flatnonzero((np.diff(here) != 1) | (np.diff(there) != 1)) + 1
        firsts = np.concatenate([np.zeros(1, np.int64), breaks])
        counts = np.diff(np.append(firsts, len(here)))
        spans = np.empty((self.num_planes, len(firsts), 3), np.uint64)
        spans[..., 0] = self._addresses(here[firsts])
        spans[..., 1] = other._addresses(there[firsts])
        spans[..., 2] = counts * self.block_bytes
        return spans.reshape(-1, 3)

    def at(self, address: int, num_blocks: int) -> "Region":
        """Return a region of another cache with the same blocks."""
        return msgspec.structs.replace(self, address=address, num_blocks=num_blocks)

    def _addresses(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the addresses of blocks, [num_planes, N]."""
        planes = np.arange(self.num_planes, dtype=np.int64)[:, None] * self.num_blocks
        return self.address + (planes + blocks) * self.block_bytes


class CacheMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of all groups of a cache, and of its states.

    Attributes:
        groups: of each group, its regions, which have as many blocks: one region of keys and
            values, or one for each part of a state. A block's number is its index in its group,
            plus the blocks of the groups before it.
        gpu: index of the GPU; None for host memory.
    """

    groups: tuple[tuple[Region, ...], ...]
    gpu: int | None = None

    @property
    def regions(self) -> Iterator[Region]:
        """All regions, in order."""
        return (region for group in self.groups for region in group)

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups."""
        return sum(group[0].num_blocks for group in self.groups)

    @property
    def largest_bytes(self) -> int:
        """Size of the largest group's block."""
        return max(sum(r.num_planes * r.block_bytes for r in group) for group in self.groups)

    def spans(
        self, blocks: Sequence[int], other: "CacheMemory", other_blocks: Sequence[int]
    ) -> Spans:
        """Return the spans that copy `other_blocks` of another cache to `blocks` of this one.

        Raises:
            ValueError: a block here and the other one are of different groups.
        """
        here, there = np.asarray(blocks, np.int64), np.asarray(other_blocks, np.int64)
        starts, other_starts = self._starts, other._starts
        group_of = np.searchsorted(starts, here, side="right") - 1
        if (group_of != np.searchsorted(other_starts, there, side="right") - 1).any():
            raise ValueError("blocks of different groups")
        parts: list[Spans] = []
        for i, regions in enumerate(zip(self.groups, other.groups, strict=True)):
            ours, theirs = here[group_of == i] - starts[i], there[group_of == i] - other_starts[i]
            if len(ours):
                pairs = zip(*regions, strict=True)
                parts += [region.spans(ours, its, theirs) for region, its in pairs]
        return np.concatenate(parts)

    @property
    def _starts(self) -> npt.NDArray[np.int64]:
        sizes = [group[0].num_blocks for group in self.groups]
        return np.cumsum([0, *sizes[:-1]], dtype=np.int64)
