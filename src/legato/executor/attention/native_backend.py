"""The KV cache of native kernels: of native layers, and of transformers' layers."""

from collections.abc import Sequence

import torch

from legato.executor.batch import PackedBatch
from legato.model.model import CacheGroup, CacheSpec
from legato.model.native_attention import NativeStep, ReadsNativeCache
from legato.model.native_kernels import NativeKernels

BLOCK_MULTIPLE = 32
"""Tokens in one product of weights and values; a block must hold a multiple of it."""


class NativeAttentionBackend:
    """Owns keys and values of each layer, in the layout of native/cache.hpp.

    Attributes:
        caches: as `NativeStep` takes them.
    """

    def __init__(
        self, model: ReadsNativeCache, spec: CacheSpec, *, num_blocks: int, block_size: int
    ) -> None:
        assert block_size % BLOCK_MULTIPLE == 0
        self._model, self._spec, self._block_size = model, spec, block_size
        shape = (spec.num_layers, 2, num_blocks, block_size * spec.layer_numbers)
        # torch.zeros would touch every page: see `take_memory`.
        self._cache = torch.empty(shape, dtype=spec.kept_dtype)
        self.caches = [
            (keys.data_ptr(), values.data_ptr(), window or 0, 0)
            for (keys, values), window in zip(self._cache, spec.sliding_windows, strict=True)
        ]

    @property
    def kernels(self) -> NativeKernels:
        return self._model.kernels

    @property
    def blocks(self) -> tuple[torch.Tensor, ...]:
        return (self._cache,)

    def begin_step(self, batch: PackedBatch) -> NativeStep:
        return NativeStep(self.kernels, [self.native_step(batch)], self.caches)

    def native_step(self, batch: PackedBatch) -> object:
        """Return the extension's step for these layers."""
        num_blocks = -(-batch.context_len // self._block_size)
        chunks = [
            (chunk.row_start, chunk.num_tokens, chunk.start, block_ids[:count].tolist())
            for chunk, block_ids, count in zip(
                batch.chunks, batch.block_table, num_blocks.tolist(), strict=True
            )
        ]
        slots = batch.slot_mapping.tolist()
        return self._model.begin_step(self._spec, self._block_size, chunks, slots)


class NativeGroupsBackend:
    """Native kernels' layers of several cache groups.

    Args:
        groups: they have every layer once; the first keeps all tokens.
        backends: one for each group.
    """

    def __init__(
        self, groups: Sequence[CacheGroup], backends: Sequence[NativeAttentionBackend]
    ) -> None:
        self._backends = tuple(backends)
        self._kernels = backends[0].kernels
        caches = {
            layer: (*cache[:-1], index)
            for index, (group, backend) in enumerate(zip(groups, backends, strict=True))
            for layer, cache in zip(group.layers, backend.caches, strict=True)
        }
        self._caches = [caches[layer] for layer in range(len(caches))]

    @property
    def blocks(self) -> tuple[torch.Tensor, ...]:
        return tuple(blocks for backend in self._backends for blocks in backend.blocks)

    def begin_step(self, batch: PackedBatch) -> NativeStep:
        steps = [backend.native_step(batch.of_group(i)) for i, backend in enumerate(self._backends)]
        return NativeStep(self._kernels, steps, self._caches)
