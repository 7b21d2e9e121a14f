"""Paged attention in plain PyTorch, for CPU and CUDA: the reference, and the fallback everywhere.

A run of adjacent blocks is a plain strided tensor, which the fused attention operators read where
it lies; the block pool keeps requests in few runs for that reason. Only short runs are copied.
"""

import torch
import torch.nn.functional as F

from legato.executor.attention.context import CachedContext, KeysValues
from legato.executor.attention.partial import attend_part, merge_parts
from legato.executor.batch import PackedBatch, PackedChunk
from legato.model.decoder import Decoder

_Runs = list[tuple[int, int]]


class TorchAttentionBackend:
    """One key and one value cache a layer, each [num_blocks * block_size, K, D]."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        shape = (num_layers, 2, num_blocks * block_size, num_kv_heads, head_dim)
        # Not zeros, which would touch every page: on a CPU memory is then taken as it is used.
        self._cache = torch.empty(shape, dtype=dtype, device=device)
        # Keys and values of each layer in turn.
        self._written = self._cache.flatten(0, 1).unbind(0)

    @classmethod
    def for_decoder(
        cls, decoder: Decoder, *, num_blocks: int, block_size: int
    ) -> "TorchAttentionBackend":
        """A backend whose cache has the decoder's shape, dtype and device."""
        return cls(
            num_layers=decoder.spec.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=decoder.spec.num_kv_heads,
            head_dim=decoder.spec.head_dim,
            dtype=decoder.dtype,
            device=decoder.device,
        )

    def begin_step(self, batch: PackedBatch) -> "TorchStepAttention":
        return TorchStepAttention(self._cache, self._written, self.block_size, batch)


class TorchStepAttention:
    """See `StepAttention`; the new keys and values are read from the batch, the rest from cache."""

    def __init__(
        self,
        cache: torch.Tensor,
        written: tuple[torch.Tensor, ...],
        block_size: int,
        batch: PackedBatch,
    ) -> None:
        self._batch = batch
        self._sizes = [chunk.num_tokens for chunk in batch.chunks]
        self._slots = [_slot_runs(chunk, block_size) for chunk in batch.chunks]
        self._cache = cache
        self._written = written
        self._contexts: dict[int | None, list[CachedContext]] = {}  # key window, value by chunk

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        self._written[2 * layer].index_copy_(0, self._batch.slot_mapping, key)
        self._written[2 * layer + 1].index_copy_(0, self._batch.slot_mapping, value)
        # Heads of a group are rows of one product in a decode, so each key is read once for them.
        grouped = query.view(len(query), key.shape[1], -1, key.shape[2]).split(self._sizes)  # type: ignore[no-untyped-call]
        attended: list[torch.Tensor] = []
        for chunk, rows, context in zip(
            self._batch.chunks, grouped, self._visible(sliding_window), strict=True
        ):
            if chunk.num_tokens == 1:
                attended.append(_attend_decode(rows, context.pieces(layer), scale))
                continue
            heads = _heads_first(rows.flatten(1, 2))
            if _fits(chunk, sliding_window):
                own = slice(chunk.row_start, chunk.row_end)
                new = _heads_first(key[own]), _heads_first(value[own])
                out = _attend_chunk(heads, context.pieces(layer), new, scale)
            else:
                assert sliding_window is not None
                out = _attend_window(heads, context.in_order(layer), sliding_window, scale)
            attended.append(out[0].transpose(0, 1).reshape(rows.shape))
        return torch.cat(attended).flatten(1, 2)

    def _visible(self, sliding_window: int | None) -> list[CachedContext]:
        """What each chunk reads from the cache: worked out once a step, not once a layer."""
        if sliding_window not in self._contexts:
            self._contexts[sliding_window] = [
                CachedContext(self._cache, _clip(slots, *_visible_tokens(chunk, sliding_window)))
                for chunk, slots in zip(self._batch.chunks, self._slots, strict=True)
            ]
        return self._contexts[sliding_window]


def _fits(chunk: PackedChunk, sliding_window: int | None) -> bool:
    """Whether each row sees all keys before it."""
    return sliding_window is None or chunk.context_len <= sliding_window


def _visible_tokens(chunk: PackedChunk, sliding_window: int | None) -> tuple[int, int]:
    """Tokens [start, end) to read from the cache; a chunk that fits has its own in the batch."""
    if chunk.num_tokens > 1 and _fits(chunk, sliding_window):
        return 0, chunk.start
    oldest = 0 if sliding_window is None else max(0, chunk.start + 1 - sliding_window)
    return oldest, chunk.context_len


def _slot_runs(chunk: PackedChunk, block_size: int) -> _Runs:
    return [(first * block_size, end * block_size) for first, end in chunk.block_runs]


def _clip(runs: _Runs, start: int, end: int) -> _Runs:
    """The slots of tokens [start, end), given the slot runs from token 0 on."""
    clipped: _Runs = []
    token = 0
    for run_start, run_end in runs:
        width = run_end - run_start
        low, high = max(start - token, 0), min(end - token, width)
        if low < high:
            clipped.append((run_start + low, run_start + high))
        token += width
    return clipped


def _heads_first(rows: torch.Tensor) -> torch.Tensor:
    """[S, K, D] -> [1, K, S, D], a view."""
    return rows.transpose(0, 1).unsqueeze(0)


def _attend_decode(query: torch.Tensor, pieces: list[KeysValues], scale: float) -> torch.Tensor:
    """[1, K, H / K, D] -> the same: all keys, so that order and mask do not matter."""
    return merge_parts(
        [attend_part(query, key, value, scale=scale, is_causal=False) for key, value in pieces]
    )


def _attend_chunk(
    query: torch.Tensor, context: list[KeysValues], own: KeysValues, scale: float
) -> torch.Tensor:
    """[1, H, T, D] -> the same: all of the context without a mask, itself causally."""
    parts = [attend_part(query, *own, scale=scale, is_causal=True)]
    parts += [
        attend_part(query, key, value, scale=scale, is_causal=False) for key, value in context
    ]
    return merge_parts(parts)


def _attend_window(
    query: torch.Tensor, visible: KeysValues, window: int, scale: float
) -> torch.Tensor:
    """[1, H, T, D] -> the same, where the window starts inside the keys, so only a mask will do.

    The last row's own key is the last of `visible`.
    """
    num_rows, num_keys = query.shape[2], visible[0].shape[2]
    row_key = torch.arange(num_keys - num_rows, num_keys, device=query.device).unsqueeze(1)
    key = torch.arange(num_keys, device=query.device)
    mask = (key <= row_key) & (key > row_key - window)
    return F.scaled_dot_product_attention(
        query, *visible, attn_mask=mask, scale=scale, enable_gqa=True
    )
