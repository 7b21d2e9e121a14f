"""The KV cache of native kernels: of native layers, and of transformers' layers."""

import torch

from legato.executor.batch import PackedBatch
from legato.model.base import CacheSpec
from legato.model.native import NativeStep, ReadsNativeCache

BLOCK_MULTIPLE = 32
"""Tokens in one product of weights and values; a block must hold a multiple of it."""


class NativeAttentionBackend:
    """Owns keys and values of each layer, in the layout of native/cache.hpp."""

    def __init__(
        self, model: ReadsNativeCache, spec: CacheSpec, *, num_blocks: int, block_size: int
    ) -> None:
        assert block_size % BLOCK_MULTIPLE == 0
        self._model, self._spec, self._block_size = model, spec, block_size
        shape = (spec.num_layers, 2, num_blocks, block_size * spec.layer_numbers)
        # torch.zeros would touch every page: see `take_memory`.
        self._cache = torch.empty(shape, dtype=spec.kept_dtype)
        self._addresses = [
            (keys.data_ptr(), values.data_ptr(), window or 0)
            for (keys, values), window in zip(self._cache, spec.sliding_windows, strict=True)
        ]

    @property
    def blocks(self) -> torch.Tensor:
        return self._cache

    def begin_step(self, batch: PackedBatch) -> NativeStep:
        num_blocks = -(-batch.context_len // self._block_size)
        chunks = [
            (chunk.row_start, chunk.num_tokens, chunk.start, block_ids[:count].tolist())
            for chunk, block_ids, count in zip(
                batch.chunks, batch.block_table, num_blocks.tolist(), strict=True
            )
        ]
        slots = batch.slot_mapping.tolist()
        return NativeStep(self._model, self._spec, self._block_size, chunks, slots, self._addresses)
