"""Swapped blocks of the KV cache, and states of recurrent layers, in host memory."""

from collections.abc import Sequence

import torch

from legato.core.plan import STATES, BlockMove
from legato.executor.state_cache import StateCache


class HostCache:
    """Slots in host memory, for a cache that is in host memory too.

    Args:
        groups: the cache, of each group [layers, planes, num_blocks, numbers of a block].
        sizes: slots for blocks of each group.
        states: of the recurrent layers; None if the model has none.
        num_states: slots for states.
    """

    def __init__(
        self,
        groups: Sequence[torch.Tensor] = (),
        sizes: Sequence[int] = (),
        *,
        states: StateCache | None = None,
        num_states: int = 0,
    ) -> None:
        # Pairs of what is in the cache, and of the slots: [places, ...] and [slots, ...].
        self._groups = [
            [_with_slots(blocks.permute(2, 0, 1, 3), count)]
            for blocks, count in zip(groups, sizes, strict=True)
        ]
        parts = [] if states is None else states.tensors
        self._states = [_with_slots(part, num_states) for part in parts if len(part)]

    def move(self, moves: Sequence[BlockMove]) -> None:
        """Copy blocks and states, in this order; it takes no memory."""
        for move in moves:
            parts = self._states if move.group == STATES else self._groups[move.group]
            for places, slots in parts:
                place, slot = places[move.block_id], slots[move.slot]
                slot.copy_(place) if move.to_host else place.copy_(slot)


def _with_slots(places: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return places, torch.empty((count, *places.shape[1:]), dtype=places.dtype)
