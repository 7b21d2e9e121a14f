"""The interface of attention backends."""

from typing import Protocol

import torch

from legato.executor.batch import PackedBatch
from legato.model.model import StepAttention


class AttentionBackend(Protocol):
    """Owns the KV cache in its kernels' layout, and attends over packed batches in it."""

    @property
    def blocks(self) -> tuple[torch.Tensor, ...]:
        """The cache itself: of each group [layers, planes, num_blocks, numbers of a block].

        `layers` are those of the group, planes are `CacheSpec.num_planes`.
        """
        ...

    def begin_step(self, batch: PackedBatch) -> StepAttention:
        """Bind a step's block tables. The model then calls `attend` once a layer."""
        ...
