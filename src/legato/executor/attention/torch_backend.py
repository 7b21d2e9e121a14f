"""Paged attention in plain PyTorch: the reference, and the fallback on every CPU.

A run of adjacent blocks is a plain strided tensor, which the fused attention operators read in
place. For that reason the block pool keeps requests in few runs. Only short runs are copied.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from legato.executor.attention.cache import KeyValueCache, make_cache
from legato.executor.attention.context import AttentionContext, KeysValues, Runs, slot_runs
from legato.executor.attention.partial import attend_explicitly, attend_part, merge_parts
from legato.executor.batch import PackedBatch, PackedChunk
from legato.model.model import CacheSpec

_SHORT_CHUNK = 32
"""Up to this many tokens, one masked call beats two merged calls.

Measured in docs/contributing/experiments.md.
"""


class _Window(NamedTuple):
    """Attributes: size, is_chunked: as in `StepAttention.attend`."""

    size: int | None
    is_chunked: bool

    def first_key(self, position: int | torch.Tensor) -> int | torch.Tensor:
        """Return the first key that a query at a position sees, or a number below 0."""
        if self.size is None:
            return 0
        return position - position % self.size if self.is_chunked else position + 1 - self.size


class TorchAttentionBackend:
    """An attention backend with a cache of its own, quantized or not."""

    def __init__(
        self, spec: CacheSpec, *, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self._device = device
        self._cache = make_cache(spec, num_blocks=num_blocks, block_size=block_size, device=device)

    @property
    def blocks(self) -> tuple[torch.Tensor, ...]:
        return (self._cache.blocks,)

    def begin_step(self, batch: PackedBatch) -> "TorchStepAttention":
        slots = torch.from_numpy(batch.slot_mapping).to(self._device, non_blocking=True)
        return TorchStepAttention(
            self._cache, slots, batch.chunks, slot_runs(batch, self.block_size)
        )


class TorchStepAttention:
    """A `StepAttention`; it does not read a long chunk's own keys and values from the cache.

    Args:
        runs: slots of all blocks of each chunk's request.
    """

    def __init__(
        self, cache: KeyValueCache, slots: torch.Tensor, chunks: list[PackedChunk], runs: list[Runs]
    ) -> None:
        self._cache = cache
        self._slots = slots
        self._chunks = chunks
        self._runs = runs
        self._sizes = [chunk.num_tokens for chunk in chunks]
        # Key the window, and whether all chunks are masked; value for each chunk: its context in
        # the cache, and a mask if it needs one.
        self._contexts: dict[
            tuple[_Window, bool], list[tuple[AttentionContext, torch.Tensor | None]]
        ] = {}

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
        num_rows = len(self._slots)
        num_padding = len(query) - num_rows
        query = self._cache.mixed(query[:num_rows])
        if key is None or value is None:
            key, value = self._cache.read(layer, self._slots)
        else:
            key, value = self._cache.write(layer, self._slots, key[:num_rows], value[:num_rows])
        # In a decode, the heads of a group are rows of one product, so each key is read once.
        grouped = query.view(len(query), key.shape[1], -1, key.shape[2]).split(self._sizes)  # type: ignore[no-untyped-call]
        attended: list[torch.Tensor] = []
        is_explicit = softcap is not None or sinks is not None
        for chunk, rows, (context, mask) in zip(
            self._chunks,
            grouped,
            self._visible(_Window(sliding_window, is_chunked), query, is_explicit=is_explicit),
            strict=True,
        ):
            if is_explicit:
                visible = context.in_order(layer)
                out = attend_explicitly(rows, visible, mask, scale, softcap=softcap, sinks=sinks)
            elif chunk.num_tokens == 1:
                out = _attend_decode(rows, context.pieces(layer), scale)
            elif mask is not None:
                out = _attend_masked(rows, context.in_order(layer), mask, scale)
            else:
                own = slice(chunk.row_start, chunk.row_end)
                new = _heads_first(key[own]), _heads_first(value[own])
                heads = _heads_first(rows.flatten(1, 2))
                parts = _attend_chunk(heads, context.pieces(layer), new, scale)
                out = parts[0].transpose(0, 1).reshape(rows.shape)
            attended.append(out)
        if num_padding:
            attended.append(grouped[0].new_zeros(num_padding, *grouped[0].shape[1:]))
        return self._cache.mixed(torch.cat(attended)).flatten(1, 2)

    def _visible(
        self, window: _Window, query: torch.Tensor, *, is_explicit: bool
    ) -> list[tuple[AttentionContext, torch.Tensor | None]]:
        """Return each chunk's context and mask; computed once a step, not once a layer."""
        key = window, is_explicit
        if key not in self._contexts:
            self._contexts[key] = [
                (
                    self._cache.context(_clip(runs, *_visible_tokens(chunk, *key))),
                    _mask(chunk, *key, query),
                )
                for chunk, runs in zip(self._chunks, self._runs, strict=True)
            ]
        return self._contexts[key]


def _is_masked(chunk: PackedChunk, window: _Window, is_explicit: bool) -> bool:
    """Whether one masked call computes the chunk's attention.

    That is faster for a short chunk, since all heads of a group then form one product. It is
    required where the window starts inside the keys, or scores are explicit.
    """
    is_clipped = window.size is not None and chunk.context_len > window.size
    is_required = is_clipped or is_explicit
    return chunk.num_tokens > 1 and (chunk.num_tokens <= _SHORT_CHUNK or is_required)


def _visible_tokens(chunk: PackedChunk, window: _Window, is_explicit: bool) -> tuple[int, int]:
    """Return the tokens [start, end) to read from the cache.

    A long chunk takes its own keys from the batch.
    """
    if chunk.num_tokens > 1 and not _is_masked(chunk, window, is_explicit):
        return 0, chunk.start
    return max(0, int(window.first_key(chunk.start))), chunk.context_len


def _mask(
    chunk: PackedChunk, window: _Window, is_explicit: bool, query: torch.Tensor
) -> torch.Tensor | None:
    """Return what is added to the scores: [T, S], T rows by the S keys of `_visible_tokens`."""
    if not _is_masked(chunk, window, is_explicit):
        return None
    first, end = _visible_tokens(chunk, window, is_explicit)
    row = torch.arange(chunk.start, chunk.context_len, device=query.device).unsqueeze(1)
    key = torch.arange(first, end, device=query.device)
    hidden = (key > row) | (key < window.first_key(row))
    return torch.zeros_like(hidden, dtype=query.dtype).masked_fill_(hidden, -torch.inf)


def _clip(runs: Runs, start: int, end: int) -> Runs:
    """Return the slots of tokens [start, end), given slot runs from token 0 on."""
    clipped: Runs = []
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
    """[1, K, H / K, D] -> the same. A decode sees all keys, so order and mask do not matter."""
    return merge_parts(
        [attend_part(query, key, value, scale=scale, is_causal=False) for key, value in pieces]
    )


def _attend_chunk(
    query: torch.Tensor, context: list[KeysValues], own: KeysValues, scale: float
) -> torch.Tensor:
    """[1, H, T, D] -> the same: the whole context without a mask, the chunk itself causally."""
    parts = [attend_part(query, *own, scale=scale, is_causal=True)]
    parts += [
        attend_part(query, key, value, scale=scale, is_causal=False) for key, value in context
    ]
    return merge_parts(parts)


def _attend_masked(
    rows: torch.Tensor, visible: KeysValues, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """[T, K, H / K, D] -> the same; `mask` is [T, S], the same for each head of a group."""
    num_rows, num_kv_heads, num_groups, head_dim = rows.shape
    # The heads of a group are rows of one product, so each key is read once.
    query = rows.permute(1, 2, 0, 3).reshape(1, num_kv_heads, num_groups * num_rows, head_dim)
    out = F.scaled_dot_product_attention(
        query, *visible, attn_mask=mask.repeat(num_groups, 1), scale=scale
    )
    return out.reshape(num_kv_heads, num_groups, num_rows, head_dim).permute(2, 0, 1, 3)
