"""Attention on native kernels: the cache that it reads, and its part of a step."""

from collections.abc import Sequence

import torch

from legato.model.model import CacheSpec
from legato.model.native_kernels import NativeKernels
from legato.model.native_weights import DTYPE


class ReadsNativeCache:
    """A model whose attention reads the native cache.

    Attributes:
        kernels: compute it.
    """

    kernels: NativeKernels

    @property
    def num_heads(self) -> int:
        """Query heads of every layer, of this rank's part."""
        raise NotImplementedError

    def begin_step(
        self,
        cache: CacheSpec,
        block_size: int,
        chunks: Sequence[tuple[int, int, int, list[int]]],
        slots: list[int],
    ) -> object:
        """Return the extension's step for the layers of one cache group.

        Args:
            cache: what these layers keep of each token.
            chunks: (first row, number of rows, position of the first, block ids) of each request.
            slots: of each row, padding excluded.
        """
        shape = cache.num_kv_heads, cache.head_dim, block_size, cache.is_quantized
        group = self.num_heads // cache.num_kv_heads
        return self.kernels.extension.Step(chunks, slots, shape, group, self.kernels.num_threads)


class NativeStep:
    """A step's packed batch for native layers, or for attention on native kernels alone.

    Args:
        steps: the extension's step of each cache group.
        caches: (address of the keys, address of the values, sliding window or 0, index of the
            group) of each layer.
    """

    def __init__(
        self,
        kernels: NativeKernels,
        steps: Sequence[object],
        caches: Sequence[tuple[int, int, int, int]],
    ) -> None:
        self._kernels = kernels
        self.steps = steps
        self.caches = caches

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        *,
        scale: float,
        sliding_window: int | None,
        is_chunked: bool = False,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if sinks is not None or is_chunked:
            raise TypeError("native attention without native layers has no sinks and no chunks")
        if key is None or value is None:
            raise TypeError("native attention without native layers writes keys and values")
        cache = self.caches[layer]
        assert cache[2] == (sliding_window or 0)
        out = query.new_empty(query.shape)
        self._kernels.operators.attend(
            self.steps[cache[-1]],
            cache,
            len(query),
            *map(_heads, (query, key, value)),
            scale,
            softcap or 0.0,
            out.data_ptr(),
        )
        return out


def _heads(rows: torch.Tensor) -> tuple[int, int, int]:
    """Return the address of heads [T, heads, D], and their strides."""
    assert rows.dtype == DTYPE
    assert rows.stride(2) == 1
    return rows.data_ptr(), rows.stride(0), rows.stride(1)
