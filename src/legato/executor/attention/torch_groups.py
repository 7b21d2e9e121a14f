"""PyTorch's attention for a model whose layers have several cache groups."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from legato.executor.attention.attention_backend import AttentionBackend
from legato.executor.batch import PackedBatch
from legato.model.model import CacheGroup, StepAttention


class TorchGroupsBackend:
    """An attention backend for each group, with a cache of its own.

    Args:
        groups: they have every layer once; the first keeps all tokens.
        backends: one for each group.
    """

    def __init__(self, groups: Sequence[CacheGroup], backends: Sequence[AttentionBackend]) -> None:
        self._backends = tuple(backends)
        # Key a layer of the whole cache, value its group and its index in the group.
        self._places = {
            layer: (group, index)
            for group, one in enumerate(groups)
            for index, layer in enumerate(one.layers)
        }

    @property
    def blocks(self) -> tuple[torch.Tensor, ...]:
        return tuple(blocks for backend in self._backends for blocks in backend.blocks)

    def begin_step(self, batch: PackedBatch) -> StepAttention:
        steps = [backend.begin_step(batch.of_group(i)) for i, backend in enumerate(self._backends)]
        return _Step(steps, self._places)


class _Step:
    """A `StepAttention` whose layers attend in their groups' steps."""

    def __init__(
        self, steps: Sequence[StepAttention], places: Mapping[int, tuple[int, int]]
    ) -> None:
        self._steps = steps
        self._places = places

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        **settings: Any,
    ) -> torch.Tensor:
        group, index = self._places[layer]
        return self._steps[group].attend(index, query, key, value, **settings)
