"""Swapped blocks of the KV cache, in host memory."""

from collections.abc import Sequence

import torch

from legato.core.plan import BlockMove


class HostCache:
    """`num_slots` blocks in host memory, for a cache that is in host memory too.

    Args:
        blocks: the cache, [layers, planes, num_blocks, numbers of a block].
    """

    def __init__(self, blocks: torch.Tensor, num_slots: int) -> None:
        self._blocks = blocks
        num_layers, num_planes, _, num_values = blocks.shape
        self._slots = torch.empty(
            (num_layers, num_planes, num_slots, num_values), dtype=blocks.dtype
        )

    def move(self, moves: Sequence[BlockMove]) -> None:
        """Copy blocks, in this order; it takes no memory."""
        for move in moves:
            block, slot = self._blocks[:, :, move.block_id], self._slots[:, :, move.slot]
            slot.copy_(block) if move.to_host else block.copy_(slot)
