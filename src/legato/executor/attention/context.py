"""A request's cached keys and values, as tensors that PyTorch's attention operators can read."""

from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from legato.executor.attention.rounding import dequantize
from legato.executor.batch import PackedBatch

MIN_RUN_IN_PLACE = 128
"""Tokens in a run from which an attention call of its own is cheaper than a copy."""

KeysValues = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, of the same shape: [1, K, S, D] in a context. Values may be the keys."""
Runs = list[tuple[int, int]]
"""Slots [start, end) of adjacent blocks, in token order."""


def slot_runs(batch: PackedBatch, block_size: int) -> list[Runs]:
    """Return each request's slots in token order; the last run may reach beyond its last token."""
    num_blocks = -(-batch.context_len // block_size)  # [R]
    ends = num_blocks.cumsum()
    is_used = np.arange(batch.block_table.shape[1]) < num_blocks[:, None]
    ids = batch.block_table[is_used]  # blocks of all requests, concatenated
    is_cut = np.empty(len(ids) + 1, dtype=np.bool_)  # whether a block starts a run; the end counts
    is_cut[0] = True
    is_cut[1:-1] = ids[1:] != ids[:-1] + 1
    is_cut[ends] = True
    cuts = is_cut.nonzero()[0]
    firsts, lasts = ids[cuts[:-1]] * block_size, (ids[cuts[1:] - 1] + 1) * block_size
    runs = list(zip(firsts.tolist(), lasts.tolist(), strict=True))
    return [runs[a:b] for a, b in pairwise((0, *cuts.searchsorted(ends).tolist()))]


class AttentionContext(Protocol):
    """Keys and values of some tokens of one request, in every layer."""

    def pieces(self, layer: int) -> list[KeysValues]:
        """All tokens, in any order."""
        ...

    def in_order(self, layer: int) -> KeysValues:
        """All tokens in one piece, in token order."""
        ...


class CachedContext:
    """Reads keys and values in place: no conversion is needed.

    The views of all layers are made together, once a step: making them in each layer took longer
    than the attention itself.

    Args:
        cache: [L, P, N, K, D], keys and values of N slots in L layers; with one plane P, keys are
            their own values.
        runs: slots of the tokens.
    """

    def __init__(self, cache: torch.Tensor, runs: Runs) -> None:
        self._num_planes = cache.shape[1]
        views = [_views(cache, start, end) for start, end in runs]
        is_long = [len(runs) == 1 or end - start >= MIN_RUN_IN_PLACE for start, end in runs]
        self._runs = views
        self._long = [view for view, long in zip(views, is_long, strict=True) if long]
        self._short = [view for view, long in zip(views, is_long, strict=True) if not long]

    def pieces(self, layer: int) -> list[KeysValues]:
        """Return long runs in place, and all short runs copied into one piece."""
        pieces = [self._pair(views, layer) for views in self._long]
        return [*pieces, self._join(self._short, layer)] if self._short else pieces

    def in_order(self, layer: int) -> KeysValues:
        return self._join(self._runs, layer)

    def _pair(self, views: tuple[torch.Tensor, ...], layer: int) -> KeysValues:
        first = self._num_planes * layer
        return views[first], views[first + self._num_planes - 1]

    def _join(self, runs: list[tuple[torch.Tensor, ...]], layer: int) -> KeysValues:
        pairs = [self._pair(views, layer) for views in runs]
        if len(pairs) == 1:
            return pairs[0]
        keys = torch.cat([key for key, _ in pairs], dim=2)
        if self._num_planes == 1:
            return keys, keys
        return keys, torch.cat([value for _, value in pairs], dim=2)


class QuantizedContext:
    """Reads keys and values as dequantized copies.

    Args:
        codes: [L, 2, num_blocks, K, block_size, D] int8.
        scales: the same without D, float32.
        runs: slots of the tokens.
        dtype: of the copies.
    """

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, runs: Runs, dtype: torch.dtype
    ) -> None:
        self._codes, self._scales, self._dtype = codes, scales, dtype
        self._runs = runs

    def pieces(self, layer: int) -> list[KeysValues]:
        return [self.in_order(layer)] if self._runs else []

    def in_order(self, layer: int) -> KeysValues:
        both = torch.cat([self._read(layer, start, end) for start, end in self._runs], dim=2)
        return both[0].unsqueeze(0), both[1].unsqueeze(0)

    def _read(self, layer: int, start: int, end: int) -> torch.Tensor:
        """Return [2, K, end - start, D], read from whole blocks."""
        block_size = self._codes.shape[4]
        first, last = start // block_size, -(-end // block_size)
        rows = dequantize(
            self._codes[layer, :, first:last], self._scales[layer, :, first:last], self._dtype
        )
        offset = start - first * block_size
        return rows.transpose(1, 2).flatten(2, 3)[:, :, offset : offset + end - start]


def _views(cache: torch.Tensor, start: int, end: int) -> tuple[torch.Tensor, ...]:
    """Return views [1, K, S, D]: all planes of layer 0, keys first, those of layer 1, and so on."""
    return cache[:, :, start:end].transpose(2, 3).flatten(0, 1).unsqueeze(1).unbind(0)
