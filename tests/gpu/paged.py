"""Steps of requests with a cache of their own, for the attention's tests."""

import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from legato.executor.attention.rounding import dequantize, quantize
from legato.gpu.work_items import TokenSpan


@dataclass(frozen=True)
class PagedStep:
    """Rows of requests whose keys and values lie in blocks of a cache, in no order.

    All else in the cache is NaN: blocks of others, and what lies behind a request's last token.

    Attributes:
        query: [P, H, D]; rows after the last span's are padding.
        keys, values: a request's own, [context, K, D] each, in the order of `spans`.
        block_table: int32 [slots, max blocks].
    """

    spans: list[TokenSpan]
    query: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor

    @classmethod
    def random(
        cls,
        rows: list[tuple[int, int]],
        *,
        heads: tuple[int, int],
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_padding: int = 0,
        seed: int = 0,
    ) -> Self:
        """A step of requests with (rows in the step, position of the first)."""
        random = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads = heads
        num_blocks = [math.ceil((n + p) / block_size) for n, p in rows]
        # Block 0, which a table's empty entries may seem to name, belongs to no request.
        ids = (1 + torch.randperm(sum(num_blocks) + 2, generator=random)).tolist()
        slots = torch.randperm(len(rows) + 1, generator=random).tolist()
        # What lies behind a table's last entry must not be used: it names no block.
        table = torch.full((len(slots), max(num_blocks) + 2), 2**30, dtype=torch.int32)
        caches = torch.full((2, len(ids) + 1, num_kv_heads, block_size, head_dim), math.nan)
        spans: list[TokenSpan] = []
        pairs: list[torch.Tensor] = []
        first_row = 0
        for i, (num_rows, position) in enumerate(rows):
            spans.append(TokenSpan(slots[i], first_row, num_rows, position))
            first_row += num_rows
            own = [ids.pop() for _ in range(num_blocks[i])]
            table[slots[i], : len(own)] = torch.tensor(own, dtype=torch.int32)
            context = position + num_rows
            pair = torch.randn(2, context, num_kv_heads, head_dim, generator=random).to(dtype)
            token = torch.arange(context)
            block = torch.tensor(own)[token // block_size]
            caches[:, block, :, token % block_size] = pair.transpose(0, 1).float()
            pairs.append(pair.to(device))
        query = torch.randn(first_row + num_padding, num_heads, head_dim, generator=random)
        key_cache, value_cache = caches.to(dtype).to(device)
        return cls(
            spans=spans,
            query=query.to(dtype).to(device),
            keys=[pair[0] for pair in pairs],
            values=[pair[1] for pair in pairs],
            key_cache=key_cache,
            value_cache=value_cache,
            block_table=table.to(device),
        )

    def quantized(self) -> Self:
        """The same with 8 bits a number; `keys` and `values` are what these stand for."""
        key_cache, value_cache = map(quantized_cache, (self.key_cache, self.value_cache))
        keys, values = (
            [dequantize(*quantize(part), torch.float32) for part in parts]
            for parts in (self.keys, self.values)
        )
        return replace(self, keys=keys, values=values, key_cache=key_cache, value_cache=value_cache)

    def expected(
        self,
        scale: float,
        sliding_window: int | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention in float64, of all but the padding: [rows, H, D]."""
        results: list[torch.Tensor] = []
        for span, keys, values in zip(self.spans, self.keys, self.values, strict=True):
            query = self.query[span.first_row : span.first_row + span.num_rows].double()
            group = query.shape[1] // keys.shape[1]
            keys, values = (t.double().repeat_interleave(group, dim=1) for t in (keys, values))
            scores = torch.einsum("thd,shd->hts", query, keys) * scale
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            row = span.position + torch.arange(span.num_rows, device=query.device)[:, None]
            key = torch.arange(len(keys), device=query.device)
            hidden = key > row
            if sliding_window is not None:
                hidden |= key <= row - sliding_window
            scores = scores.masked_fill(hidden, -math.inf)
            if sinks is not None:
                of_rows = sinks.double()[:, None, None].expand(-1, span.num_rows, 1)
                scores = torch.cat([scores, of_rows], dim=-1)
            weights = scores.softmax(dim=-1)[..., : len(keys)]
            results.append(torch.einsum("hts,shd->thd", weights, values))
        return torch.cat(results)


def quantized_cache(cache: torch.Tensor) -> torch.Tensor:
    """[num_blocks, K, block size, D] as `CacheSpec` describes it in int8."""
    codes, scales = quantize(cache)
    heads = torch.cat([codes.flatten(2), scales.view(torch.int8)], dim=2)
    return heads.view(*cache.shape[:3], -1)


def numpy_section(size: int) -> np.ndarray:
    """As a step's inputs are: with what was there before."""
    return np.full(size, 77, dtype=np.int32)
