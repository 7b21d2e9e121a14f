"""Swapped blocks of the KV cache, in host memory."""

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

import torch

from legato.core.plan import BlockMove

_MOST = 64
"""Blocks copied at once; the copy needs as much memory again."""


class HostCache:
    """`num_slots` blocks in host memory, for a cache that is in host memory too.

    Args:
        blocks: the cache, [layers, 2, num_blocks, numbers of a block].
    """

    def __init__(self, blocks: torch.Tensor, num_slots: int) -> None:
        self._blocks = blocks
        num_layers, pair, _, num_values = blocks.shape
        self._slots = torch.empty((num_layers, pair, num_slots, num_values), dtype=blocks.dtype)

    def move(self, moves: Sequence[BlockMove]) -> None:
        """Copy blocks, in this order."""
        for to_host, group in groupby(moves, attrgetter("to_host")):
            alike = list(group)
            for first in range(0, len(alike), _MOST):
                self._copy(alike[first : first + _MOST], to_host=to_host)

    def _copy(self, moves: list[BlockMove], *, to_host: bool) -> None:
        block_ids = torch.tensor([move.block_id for move in moves])
        slots = torch.tensor([move.slot for move in moves])
        if to_host:
            self._slots.index_copy_(2, slots, self._blocks.index_select(2, block_ids))
        else:
            self._blocks.index_copy_(2, block_ids, self._slots.index_select(2, slots))
