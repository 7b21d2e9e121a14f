"""Mixing heads of an 8-bit cache, as `executor.attention.rounding.mix` does."""

import torch
import triton
import triton.language as tl

_HEADS = 8
"""Heads of a program."""


def mix_heads(heads: torch.Tensor) -> None:
    """Mix heads [P, H, D], contiguous, in place."""
    num_heads, half = heads.shape[0] * heads.shape[1], heads.shape[2] // 2
    if num_heads:
        _mix_heads[(triton.cdiv(num_heads, _HEADS),)](
            heads,
            num_heads,
            half=half,
            padded_half=triton.next_power_of_2(half),
            heads_at_once=_HEADS,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["num_heads"])
def _mix_heads(
    heads, num_heads, half: tl.constexpr, padded_half: tl.constexpr, heads_at_once: tl.constexpr
):
    head = tl.program_id(0) * heads_at_once + tl.arange(0, heads_at_once)[:, None]
    at = tl.arange(0, padded_half)[None, :]
    place = heads + head.to(tl.int64) * (2 * half) + at
    is_there = (head < num_heads) & (at < half)
    low, high = load_halves(place, half, is_there)
    low, high = mixed(low, high, half)
    tl.store(place, low.to(heads.dtype.element_ty), mask=is_there)
    tl.store(place + half, high.to(heads.dtype.element_ty), mask=is_there)


@triton.jit
def load_halves(place, half: tl.constexpr, is_there):
    """Load the two halves of heads as float32, with zeros where there is nothing."""
    low = tl.load(place, mask=is_there, other=0.0).to(tl.float32)
    high = tl.load(place + half, mask=is_there, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def mixed(low, high, half: tl.constexpr):
    """Mix heads [N, 2, padded half], given as halves with zeros after them, and keep the zeros."""
    piece: tl.constexpr = half & -half
    low, high = low + high, low - high
    return _mixed_half(low, half, piece), _mixed_half(high, half, piece)


@triton.jit
def _mixed_half(x, half: tl.constexpr, piece: tl.constexpr):
    shape: tl.constexpr = x.shape
    size: tl.constexpr = x.numel
    num_stages: tl.constexpr = tl.constexpr(piece.bit_length() - 1)
    for stage in tl.static_range(num_stages):
        pairs = tl.reshape(x, [size // 2 ** (stage + 1), 2, 2**stage])
        one, other = tl.split(tl.permute(pairs, [0, 2, 1]))
        pairs = tl.permute(tl.join(one + other, one - other), [0, 2, 1])
        x = tl.reshape(pairs, shape)
    x *= (2 * piece) ** -0.5
    if half > piece:
        num_pieces: tl.constexpr = half // piece
        pieces = tl.reshape(x, [size // shape[1], shape[1] // piece, piece])
        total = tl.sum(pieces, axis=1, keep_dims=True)
        is_there = tl.arange(0, shape[1] // piece) < num_pieces
        pieces = tl.where(is_there[None, :, None], pieces - total * (2.0 / num_pieces), 0.0)
        x = tl.reshape(pieces, shape)
    return x
