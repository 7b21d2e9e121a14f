"""The slots of recurrent layers' states, and which of them a step reads and writes."""

from collections.abc import Sequence

import torch

from legato.core.plan import SCRATCH_STATE, ZERO_STATE, StateChange
from legato.executor.batch import PackedBatch
from legato.model.states import StateRun, StateShape, StepStates, make_states

OUTSIDE = StateChange(ZERO_STATE, SCRATCH_STATE)
"""Slots of a chunk without any: of a first pass or a test of the executor, whose state is lost."""


class StateCache:
    """The states of all requests, with a slot of zeros and a slot for lost states.

    Args:
        shapes: of each recurrent layer's state; at least one.
        num_slots: both special ones included.
        dtype: of the model.

    Raises:
        MemoryError: there is not enough memory.
    """

    def __init__(
        self,
        shapes: Sequence[StateShape],
        *,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = make_states(shapes, num_slots, dtype, device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All slots of all layers."""
        return [part for layer in self.layers for part in layer]

    def begin_step(
        self, batch: PackedBatch, changes: Sequence[StateChange | None] = ()
    ) -> StepStates:
        """Bind a step's slots.

        Args:
            changes: of each chunk, None for one without; none if all states are to be lost.
        """
        changes = changes or [None] * len(batch.chunks)
        return StepStates(
            self.layers,
            [
                StateRun(packed.row_start, packed.row_end, packed.start, *(change or OUTSIDE))
                for packed, change in zip(batch.chunks, changes, strict=True)
            ],
        )
