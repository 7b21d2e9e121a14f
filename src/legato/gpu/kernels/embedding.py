"""Looks up token vectors, also of tokens that only the device knows yet."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def embed(
    input_source: torch.Tensor,
    last_token: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float = 1.0,
    first: int = 0,
) -> None:
    """Look up the vector of each row's token.

    Args:
        input_source: int32 [P]: a token id, or -1 - slot for the token at `last_token[slot]`.
        last_token: int32 [S + 1].
        table: [V, E], of tokens from `first` on; other tokens get zeros.
        out: float32 [P, E], `scale` times the vectors; written.
    """
    num_rows, size = out.shape
    _embed[num_rows, triton.cdiv(size, _BLOCK)](
        input_source,
        last_token,
        table,
        out,
        size,
        first,
        len(table),
        table.stride(0),
        scale,
        block=_BLOCK,
    )


@triton.jit
def _embed(
    input_source,
    last_token,
    table,
    out,
    size,
    first,
    num_tokens,
    table_stride,
    scale,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * block + tl.arange(0, block)
    token = tl.load(input_source + row)
    if token < 0:
        token = tl.load(last_token - 1 - token)
    place = (token - first).to(tl.int64) + tl.zeros([block], tl.int64)
    is_there = (place >= 0) & (place < num_tokens) & (column < size)
    values = tl.load(table + place * table_stride + column, mask=is_there, other=0.0)
    values = scale * values.to(tl.float32)
    tl.store(out + row.to(tl.int64) * size + column, values, mask=column < size)
