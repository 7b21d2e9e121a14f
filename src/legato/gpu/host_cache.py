"""Swapped blocks of a GPU's cache in host memory, copied while the GPU computes."""

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

import numpy as np
import torch

from legato.core.plan import BlockMove
from legato.gpu.device import Device

_MOST = 64
"""Blocks copied at once; the copy needs as much memory again."""


class GpuHostCache:
    """`num_slots` blocks in host memory that the device can copy by itself.

    All copies run on the device's second stream, in order. Blocks to swap out are gathered before
    the next step may overwrite them. Blocks to swap in are copied while the step before is
    computed, and put in place after it.

    Args:
        blocks: the cache, [layers, 2, num_blocks, numbers of a block].
    """

    def __init__(self, device: Device, blocks: torch.Tensor, num_slots: int) -> None:
        self._device = device
        self._blocks = blocks.permute(2, 0, 1, 3)
        # Values that are copied together are adjacent.
        shape = num_slots, *self._blocks.shape[1:]
        self._slots = device.host_tensor(*shape, dtype=blocks.dtype)

    def move(self, moves: Sequence[BlockMove]) -> None:
        """Launch copies, in this order, before the next step."""
        for to_host, group in groupby(moves, attrgetter("to_host")):
            alike = list(group)
            for first in range(0, len(alike), _MOST):
                some = alike[first : first + _MOST]
                self._move_out(some) if to_host else self._move_in(some)

    def _move_out(self, moves: list[BlockMove]) -> None:
        rows = self._blocks.index_select(0, self._block_ids(moves))
        with self._device.beside(follows=True):
            for row, move in zip(rows, moves, strict=True):
                self._slots[move.slot].copy_(row, non_blocking=True)
        self._device.lend(rows)

    def _move_in(self, moves: list[BlockMove]) -> None:
        with self._device.beside(follows=False):
            rows = self._blocks.new_empty(len(moves), *self._blocks.shape[1:])
            for row, move in zip(rows, moves, strict=True):
                row.copy_(self._slots[move.slot], non_blocking=True)
        self._device.join()
        self._blocks.index_copy_(0, self._block_ids(moves), rows)
        self._device.lend(rows)

    def _block_ids(self, moves: list[BlockMove]) -> torch.Tensor:
        return self._device.upload(np.array([move.block_id for move in moves], dtype=np.int64))
