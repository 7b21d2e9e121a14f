"""The KV cache of PyTorch's attention, plain or quantized."""

from typing import Protocol

import torch

from legato.executor.attention.context import (
    AttentionContext,
    CachedContext,
    KeysValues,
    QuantizedContext,
    Runs,
)
from legato.executor.attention.rounding import dequantize, mix, quantize
from legato.model.model import CacheSpec


class KeyValueCache(Protocol):
    """Slots for keys and values [K, D] in every layer."""

    @property
    def blocks(self) -> torch.Tensor:
        """[layers, planes, num_blocks, numbers of a block]; planes are `CacheSpec.num_planes`."""
        ...

    def mixed(self, rows: torch.Tensor) -> torch.Tensor:
        """Return heads [..., D] as keys and values are held; of its results, what they were."""
        ...

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> KeysValues:
        """Write keys and values [T, K, D]; return them as a reader of the cache gets them."""
        ...

    def read(self, layer: int, slots: torch.Tensor) -> KeysValues:
        """Return what `write` returned for these slots, as copies."""
        ...

    def context(self, runs: Runs) -> AttentionContext:
        """Return the keys and values of these slots."""
        ...


def make_cache(
    spec: CacheSpec, *, num_blocks: int, block_size: int, device: torch.device
) -> KeyValueCache:
    # torch.zeros would touch every page; on a CPU, torch.empty takes memory only as it is used.
    shape = (spec.num_layers, spec.num_planes, num_blocks, block_size * spec.layer_numbers)
    blocks = torch.empty(shape, dtype=spec.kept_dtype, device=device)
    kind = _QuantizedCache if spec.is_quantized else _PlainCache
    return kind(blocks, spec, block_size)


class _PlainCache:
    """Blocks of numbers [block_size, K, D], so that adjacent blocks are one strided tensor."""

    def __init__(self, blocks: torch.Tensor, spec: CacheSpec, block_size: int) -> None:
        self.blocks = blocks
        num_layers, num_planes, num_blocks, _ = blocks.shape
        self._slots = blocks.view(
            num_layers, num_planes, num_blocks * block_size, spec.num_kv_heads, spec.head_dim
        )
        # Keys of layer 0, values of layer 0 if there are any, keys of layer 1, and so on.
        self._written = self._slots.flatten(0, 1).unbind(0)
        self._num_planes = num_planes

    def mixed(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> KeysValues:
        keys, *values = self._planes(layer)
        keys.index_copy_(0, slots, key)
        for plane in values:
            plane.index_copy_(0, slots, value)
        return key, value

    def read(self, layer: int, slots: torch.Tensor) -> KeysValues:
        planes = [plane.index_select(0, slots) for plane in self._planes(layer)]
        return planes[0], planes[-1]

    def _planes(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return the keys of a layer, and its values if there are any."""
        first = self._num_planes * layer
        return self._written[first : first + self._num_planes]

    def context(self, runs: Runs) -> AttentionContext:
        return CachedContext(self._slots, runs)


class _QuantizedCache:
    """Blocks laid out as `CacheSpec` says: the tokens of each head are adjacent, in order."""

    def __init__(self, blocks: torch.Tensor, spec: CacheSpec, block_size: int) -> None:
        self.blocks = blocks
        self._block_size, self._dtype = block_size, spec.dtype
        heads = blocks.view(*blocks.shape[:3], spec.num_kv_heads, -1)
        num_codes = block_size * spec.head_dim
        # codes [L, 2, num_blocks, K, block_size, D]; scales the same without D
        self._codes = heads[..., :num_codes].view(*heads.shape[:4], block_size, -1)
        self._scales = heads[..., num_codes:].view(torch.float32)

    def mixed(self, rows: torch.Tensor) -> torch.Tensor:
        return mix(rows)

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> KeysValues:
        where = self._place(slots)
        seen: list[torch.Tensor] = []
        for pair, rows in enumerate((key, value)):
            codes, scales = quantize(mix(rows.float()))
            self._codes[layer, pair][where] = codes
            self._scales[layer, pair][where] = scales
            seen.append(dequantize(codes, scales, rows.dtype))
        return seen[0], seen[1]

    def read(self, layer: int, slots: torch.Tensor) -> KeysValues:
        where = self._place(slots)
        pairs = zip(self._codes[layer], self._scales[layer], strict=True)
        keys, values = (dequantize(codes[where], own[where], self._dtype) for codes, own in pairs)
        return keys, values

    def _place(self, slots: torch.Tensor) -> tuple[torch.Tensor, slice, torch.Tensor]:
        """Return the index of slots in blocks [num_blocks, K, block_size, ...]."""
        return slots // self._block_size, slice(None), slots % self._block_size

    def context(self, runs: Runs) -> AttentionContext:
        return QuantizedContext(self._codes, self._scales, runs, self._dtype)
