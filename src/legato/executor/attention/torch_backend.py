"""Paged attention in plain PyTorch, for CPU and CUDA: the reference, and the fallback everywhere.

A run of adjacent blocks is a plain strided tensor, which the fused attention operators read where
it lies; the block pool keeps requests in few runs for that reason. Only short runs are copied.
"""

import torch
import torch.nn.functional as F

from legato.executor.attention.partial import attend_part, merge_parts
from legato.executor.batch import PackedBatch, PackedChunk

MIN_RUN_IN_PLACE = 128
"""Tokens from which a call of its own is cheaper than copying a run."""


_Runs = list[tuple[int, int]]
_KeysValues = tuple[torch.Tensor, torch.Tensor]  # each [S, K, D]


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
        self._cache = torch.zeros(shape, dtype=dtype, device=device)  # pages are mapped as used

    def begin_step(self, batch: PackedBatch) -> "TorchStepAttention":
        return TorchStepAttention(self._cache, self.block_size, batch)


class TorchStepAttention:
    """See `StepAttention`; the new keys and values are read from the batch, the rest from cache."""

    def __init__(self, cache: torch.Tensor, block_size: int, batch: PackedBatch) -> None:
        self._cache = cache
        self._batch = batch
        self._slots = [_slot_runs(chunk, block_size) for chunk in batch.chunks]
        self._visible: dict[int | None, list[_Runs]] = {}  # key window, value slots a chunk reads

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
        keys, values = self._cache[layer]
        keys.index_copy_(0, self._batch.slot_mapping, key)
        values.index_copy_(0, self._batch.slot_mapping, value)
        out = torch.empty_like(query)
        for chunk, slots in zip(self._batch.chunks, self._visible_slots(sliding_window), strict=True):
            rows = slice(chunk.row_start, chunk.row_end)
            if chunk.num_tokens == 1:
                attended = _attend_decode(query[rows], _pieces(keys, values, slots), scale)
            elif _fits(chunk, sliding_window):
                context = _pieces(keys, values, slots)
                attended = _attend_chunk(query[rows], context, (key[rows], value[rows]), scale)
            else:
                assert sliding_window is not None
                visible = _gather(keys, values, slots)
                attended = _attend_window(query[rows], visible, sliding_window, scale)
            out[rows] = attended
        return out

    def _visible_slots(self, sliding_window: int | None) -> list[_Runs]:
        """For each chunk the cache slots to read: worked out once a step, not once a layer."""
        if sliding_window not in self._visible:
            self._visible[sliding_window] = [
                _clip(slots, *_visible_tokens(chunk, sliding_window))
                for chunk, slots in zip(self._batch.chunks, self._slots, strict=True)
            ]
        return self._visible[sliding_window]


def _fits(chunk: PackedChunk, sliding_window: int | None) -> bool:
    """Whether each row sees all keys before it."""
    return sliding_window is None or chunk.context_len <= sliding_window


def _visible_tokens(chunk: PackedChunk, sliding_window: int | None) -> tuple[int, int]:
    """Tokens [start, end) to read from the cache; a chunk that fits has its own keys in the batch."""
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


def _gather(keys: torch.Tensor, values: torch.Tensor, runs: _Runs) -> _KeysValues:
    if len(runs) == 1:
        start, end = runs[0]
        return keys[start:end], values[start:end]
    return (
        torch.cat([keys[start:end] for start, end in runs]),
        torch.cat([values[start:end] for start, end in runs]),
    )


def _pieces(keys: torch.Tensor, values: torch.Tensor, runs: _Runs) -> list[_KeysValues]:
    """Long runs where they lie and the short ones copied together; unmasked, order is nothing."""
    if len(runs) == 1:
        return [_gather(keys, values, runs)]
    long = [run for run in runs if run[1] - run[0] >= MIN_RUN_IN_PLACE]
    short = [run for run in runs if run[1] - run[0] < MIN_RUN_IN_PLACE]
    pieces = [_gather(keys, values, [run]) for run in long]
    return [*pieces, _gather(keys, values, short)] if short else pieces


def _heads_first(rows: torch.Tensor) -> torch.Tensor:
    """[S, K, D] -> [1, K, S, D], a view."""
    return rows.transpose(0, 1).unsqueeze(0)


def _attend_decode(query: torch.Tensor, pieces: list[_KeysValues], scale: float) -> torch.Tensor:
    """[1, H, D] -> [1, H, D]: the query heads of a group are the rows, so each key is read once."""
    num_kv_heads = pieces[0][0].shape[1]
    grouped = query.view(1, num_kv_heads, -1, query.shape[-1])
    parts = [
        attend_part(grouped, _heads_first(k), _heads_first(v), scale=scale, is_causal=False)
        for k, v in pieces
    ]
    return merge_parts(parts).reshape(query.shape)


def _attend_chunk(
    query: torch.Tensor, context: list[_KeysValues], own: _KeysValues, scale: float
) -> torch.Tensor:
    """[T, H, D] -> [T, H, D]: all of the context without a mask, and causally the chunk itself."""
    rows = _heads_first(query)
    parts = [
        attend_part(rows, _heads_first(own[0]), _heads_first(own[1]), scale=scale, is_causal=True)
    ]
    parts += [
        attend_part(rows, _heads_first(k), _heads_first(v), scale=scale, is_causal=False)
        for k, v in context
    ]
    return merge_parts(parts)[0].transpose(0, 1)


def _attend_window(
    query: torch.Tensor, visible: _KeysValues, window: int, scale: float
) -> torch.Tensor:
    """[T, H, D] -> [T, H, D] where the window starts inside the keys, so that only a mask will do.

    The last row's own key is the last of `visible`.
    """
    num_rows, num_keys = query.shape[0], visible[0].shape[0]
    row_key = torch.arange(num_keys - num_rows, num_keys, device=query.device).unsqueeze(1)
    key = torch.arange(num_keys, device=query.device)
    mask = (key <= row_key) & (key > row_key - window)
    attended = F.scaled_dot_product_attention(
        _heads_first(query),
        _heads_first(visible[0]),
        _heads_first(visible[1]),
        attn_mask=mask,
        scale=scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)
