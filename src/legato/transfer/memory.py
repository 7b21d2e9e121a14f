"""The memory of a cache's blocks, for copies between caches."""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Spans = npt.NDArray[np.uint64]
"""[N, 3]: address here, address there, bytes."""


class CacheMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Planes of blocks, one after the other: keys of layer 0, values of layer 0, and so on.

    Attributes:
        block_bytes: bytes of a block in one plane.
        gpu: index of the GPU; None for host memory.
    """

    address: int
    num_planes: int
    num_blocks: int
    block_bytes: int
    gpu: int | None = None

    @property
    def num_bytes(self) -> int:
        return self.num_planes * self.num_blocks * self.block_bytes

    def spans(
        self, blocks: Sequence[int], other: "CacheMemory", other_blocks: Sequence[int]
    ) -> Spans:
        """Return the spans that copy `other_blocks` of another cache to `blocks` of this one.

        Blocks that are adjacent in both caches are one span of each plane.
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

    def _addresses(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the addresses of blocks, [num_planes, N]."""
        planes = np.arange(self.num_planes, dtype=np.int64)[:, None] * self.num_blocks
        return self.address + (planes + blocks) * self.block_bytes
