"""What an attention backend is."""

from typing import Protocol

import torch

from legato.executor.batch import PackedBatch
from legato.model.base import StepAttention


class AttentionBackend(Protocol):
    """Owns the KV cache, in the layout its kernels want, and attends over packed batches in it."""

    @property
    def blocks(self) -> torch.Tensor:
        """The cache, [layers, 2, num_blocks, numbers of a block]; writing here is writing there."""
        ...

    def begin_step(self, batch: PackedBatch) -> StepAttention:
        """Bind a step's block tables; the model then calls `attend` once a layer."""
        ...
