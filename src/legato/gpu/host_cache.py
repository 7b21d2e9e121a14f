"""Swapped blocks of a GPU's cache in host memory, copied while the GPU computes."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter

import numpy as np
import torch

from legato.core.plan import BlockMove
from legato.gpu.device import Device

_STAGED_BYTES = 64 * 2**20


def num_staged_blocks(block_bytes: int) -> int:
    """Return the blocks that `GpuHostCache` has room for on the device, beside the cache.

    Args:
        block_bytes: keys and values of one block, in all layers.
    """
    return max(1, _STAGED_BYTES // block_bytes)


class GpuHostCache:
    """Blocks of each cache group in host memory.

    Args:
        blocks: of each group.
        sizes: blocks that host memory keeps of each.
    """

    def __init__(
        self, device: Device, blocks: Sequence[torch.Tensor], sizes: Sequence[int]
    ) -> None:
        self._groups = [
            _HostBlocks(device, own, size) for own, size in zip(blocks, sizes, strict=True)
        ]

    def move(self, moves: Sequence[BlockMove]) -> None:
        """Launch copies, those of a group in this order, before the next step."""
        for index, group in enumerate(self._groups):
            own = [move for move in moves if move.group == index]
            if own:
                group.move(own)


class _HostBlocks:
    """`num_slots` blocks of a group in host memory that the device can copy by itself.

    All copies run on the device's second stream, in order. Blocks to swap out are gathered before
    the next step may overwrite them. Blocks to swap in are copied while the step before is
    computed, and put in place after it. Between cache and host they stay in a ring of a few blocks
    on the device: whenever it is full, the streams wait for each other.

    Args:
        blocks: [layers, 2, num_blocks, numbers of a block].
    """

    def __init__(self, device: Device, blocks: torch.Tensor, num_slots: int) -> None:
        self._device = device
        self._blocks = blocks.permute(2, 0, 1, 3)
        # Values that are copied together are adjacent.
        shape = self._blocks.shape[1:]
        self._slots = device.host_tensor(num_slots, *shape, dtype=blocks.dtype)
        num_staged = num_staged_blocks(shape.numel() * blocks.itemsize) if num_slots else 0
        self._ring = blocks.new_empty(num_staged, *shape)
        self._next = 0  # in the ring
        self._is_reused = False  # the ring began anew, and the second stream has not waited yet

    def move(self, moves: Sequence[BlockMove]) -> None:
        """Launch copies, in this order, before the next step."""
        # All the memory that it takes, so that nothing is copied if there is none.
        block_ids = self._device.upload(np.array([move.block_id for move in moves]))
        start = 0
        for to_host, group in groupby(moves, attrgetter("to_host")):
            slots = [move.slot for move in group]
            end = start + len(slots)
            copy = self._copy_out if to_host else self._copy_in
            for first, staged in self._staged(len(slots)):
                part = slice(first, first + len(staged))
                copy(block_ids[start:end][part], slots[part], staged)
            start = end

    def _staged(self, count: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield parts of the ring for `count` blocks, each with the index of its first block."""
        first = 0
        while first < count:
            if self._next == len(self._ring):
                self._device.join()
                self._next, self._is_reused = 0, True
            staged = self._ring[self._next :][: count - first]
            self._next += len(staged)
            yield first, staged
            first += len(staged)

    def _copy_out(self, block_ids: torch.Tensor, slots: list[int], staged: torch.Tensor) -> None:
        torch.index_select(self._blocks, 0, block_ids, out=staged)
        with self._device.beside(follows=True):
            for row, slot in zip(staged, slots, strict=True):
                self._slots[slot].copy_(row, non_blocking=True)
        self._is_reused = False

    def _copy_in(self, block_ids: torch.Tensor, slots: list[int], staged: torch.Tensor) -> None:
        with self._device.beside(follows=self._is_reused):
            for row, slot in zip(staged, slots, strict=True):
                row.copy_(self._slots[slot], non_blocking=True)
        self._is_reused = False
        self._device.join()
        self._blocks.index_copy_(0, block_ids, staged)
