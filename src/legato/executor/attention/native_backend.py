"""The cache of the native layers, which attend in it themselves."""

from itertools import pairwise

import torch

from legato.executor.batch import PackedBatch
from legato.model.decoder import Decoder
from legato.model.native import Machine, NativeStep

BLOCK_MULTIPLE = 32
"""Tokens that one product of weights and values takes: they must lie in one block."""


class NativeAttentionBackend:
    """Keys and values of each layer, in the layout that native/attention.hpp tells."""

    def __init__(
        self, decoder: Decoder, machine: Machine, *, num_blocks: int, block_size: int
    ) -> None:
        assert block_size % BLOCK_MULTIPLE == 0
        self._spec, self._machine, self._block_size = decoder.spec, machine, block_size
        layer_values = num_blocks * block_size * self._spec.num_kv_heads * self._spec.head_dim
        # Not zeros, which would touch every page: see `take_memory`.
        self._cache = torch.empty(self._spec.num_layers, 2, layer_values, dtype=decoder.dtype)
        self._caches = [
            (keys.data_ptr(), values.data_ptr(), window or 0)
            for (keys, values), window in zip(self._cache, self._spec.sliding_windows, strict=True)
        ]

    @property
    def blocks(self) -> torch.Tensor:
        block_values = self._block_size * self._spec.num_kv_heads * self._spec.head_dim
        return self._cache.view(self._spec.num_layers, 2, -1, block_values)

    def begin_step(self, batch: PackedBatch) -> NativeStep:
        num_blocks = -(-batch.context_len // self._block_size)
        chunks = [
            (first, end - first, context_len - (end - first), block_ids[:count].tolist())
            for (first, end), context_len, block_ids, count in zip(
                pairwise(batch.query_start.tolist()),
                batch.context_len.tolist(),
                batch.block_table,
                num_blocks.tolist(),
                strict=True,
            )
        ]
        return NativeStep(
            self._machine,
            self._spec,
            self._block_size,
            chunks,
            batch.slot_mapping.tolist(),
            self._caches,
        )
