"""Norm, rotary embedding and cache writes: one pass from a layer's projection to its attention."""

import torch
import triton
import triton.language as tl

from legato.gpu.kernels.cache import head_dim_of, scales_of
from legato.gpu.kernels.mixing import load_halves, mixed


def rope_table(
    positions: torch.Tensor, inverse: torch.Tensor, scaling: float | torch.Tensor
) -> torch.Tensor:
    """Return cosines and sines of a step's rows, for all layers with a rope.

    Args:
        positions: int32 [P].
        inverse: float32 [D / 2], `RotaryEmbedding.inverse`.
        scaling: `RotaryEmbedding.scaling`.

    Returns:
        float32 [P, 2, D / 2]: cosines, then sines.
    """
    angles = positions.to(torch.float32)[:, None] * inverse
    table = torch.empty(len(angles), 2, len(inverse), dtype=torch.float32, device=inverse.device)
    torch.cos(angles, out=table[:, 0])
    torch.sin(angles, out=table[:, 1])
    is_plain = isinstance(scaling, float) and scaling == 1.0
    return table if is_plain else table.mul_(scaling)


def rotate_and_write(
    qkv: torch.Tensor,
    table: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    is_norm_last: bool = False,
    has_keys: bool = True,
) -> torch.Tensor:
    """Normalize and rotate queries and keys, and write keys and values to the cache.

    Args:
        qkv: [P, (H + 2K) * D], from the projection; its queries are overwritten.
        table: from `rope_table`.
        slot_mapping: int32 [P], block id * block size + offset; -1 for rows that are not written.
        key_cache, value_cache: one layer's, as for `attend`; keys and values of a quantized cache
            are mixed and rounded as in `executor.attention.rounding`.
        q_norm, k_norm: float32 [D], RMSNorm's weights of a head; both or neither, if rows have
            both.
        is_norm_last: rotate before the norm.
        has_keys: whether rows have keys and values; if not, only queries are computed.

    Returns:
        The queries: [P, H, D], a view of `qkv`; for a quantized cache, mixed as its keys are.
    """
    num_rows, width = qkv.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    head_dim, is_quantized = head_dim_of(key_cache), key_cache.dtype == torch.int8
    num_heads = width // head_dim - (2 * num_kv_heads if has_keys else 0)
    has_norm = q_norm is not None
    weights = tuple(table if norm is None else norm for norm in (q_norm, k_norm))
    if num_rows:
        _rotate_and_write[(num_rows * num_kv_heads,)](
            qkv,
            table,
            slot_mapping,
            *weights,
            key_cache,
            value_cache,
            *(scales_of(cache) if is_quantized else cache for cache in (key_cache, value_cache)),
            eps,
            key_cache.stride(0),
            qkv.stride(0),
            num_kv_heads=num_kv_heads,
            group=num_heads // num_kv_heads,
            padded_group=triton.next_power_of_2(num_heads // num_kv_heads),
            half=head_dim // 2,
            padded_half=triton.next_power_of_2(head_dim // 2),
            block_size=block_size,
            is_quantized=is_quantized,
            has_norm_first=has_norm and not is_norm_last,
            has_norm_last=has_norm and is_norm_last,
            has_keys=has_keys,
            num_warps=2,
            enable_fp_fusion=not is_quantized,
        )
    return qkv[:, : num_heads * head_dim].view(num_rows, num_heads, head_dim)


# The alignment of a step's inputs depends on its size; do not compile for each alignment.
@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _rotate_and_write(
    qkv,
    table,
    slot_mapping,
    q_norm,
    k_norm,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    eps,
    block_stride,
    row_stride,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    half: tl.constexpr,
    padded_half: tl.constexpr,
    block_size: tl.constexpr,
    is_quantized: tl.constexpr,
    has_norm_first: tl.constexpr,
    has_norm_last: tl.constexpr,
    has_keys: tl.constexpr,
):
    """Process one row and one key head: its group's queries, its key and its value."""
    row = tl.program_id(0) // num_kv_heads
    kv_head = tl.program_id(0) % num_kv_heads
    num_heads: tl.constexpr = group * num_kv_heads
    head_dim: tl.constexpr = 2 * half
    at = tl.arange(0, padded_half)
    is_pair = at < half
    cos = tl.load(table + row * head_dim + at, mask=is_pair, other=0.0)
    sin = tl.load(table + row * head_dim + half + at, mask=is_pair, other=0.0)
    heads = qkv + row.to(tl.int64) * row_stride

    member = tl.arange(0, padded_group)[:, None]
    query = heads + (kv_head * group + member) * head_dim + at[None, :]
    is_query = (member < group) & is_pair[None, :]
    low, high = load_halves(query, half, is_query)
    if has_norm_first:
        low, high = _normed(low, high, q_norm, eps, half, padded_half)
    low, high = low * cos - high * sin, high * cos + low * sin
    if has_norm_last:
        low, high = _normed(low, high, q_norm, eps, half, padded_half)
    if is_quantized:
        low, high = mixed(low, high, half)
    type = qkv.dtype.element_ty
    tl.store(query, low.to(type), mask=is_query)
    tl.store(query + half, high.to(type), mask=is_query)

    slot = tl.load(slot_mapping + row) if has_keys else -1
    if slot < 0:
        return
    key = heads + (num_heads + kv_head) * head_dim + at
    low, high = load_halves(key, half, is_pair)
    if has_norm_first:
        low, high = _normed(low, high, k_norm, eps, half, padded_half)
    low, high = low * cos - high * sin, high * cos + low * sin
    if has_norm_last:
        low, high = _normed(low, high, k_norm, eps, half, padded_half)
    value_low, value_high = load_halves(key + num_kv_heads * head_dim, half, is_pair)
    block, offset = (slot // block_size).to(tl.int64), slot % block_size
    head_numbers: tl.constexpr = block_size * (head_dim + (4 if is_quantized else 0))
    place = block * block_stride + kv_head * head_numbers + offset * head_dim + at
    if is_quantized:
        behind = block * (block_stride // 4) + kv_head * (head_numbers // 4)
        behind += block_size * head_dim // 4 + offset
        _write_codes(key_cache + place, key_scales + behind, low, high, half, is_pair)
        _write_codes(
            value_cache + place, value_scales + behind, value_low, value_high, half, is_pair
        )
    else:
        tl.store(key_cache + place, low.to(type), mask=is_pair)
        tl.store(key_cache + place + half, high.to(type), mask=is_pair)
        tl.store(value_cache + place, value_low.to(type), mask=is_pair)
        tl.store(value_cache + place + half, value_high.to(type), mask=is_pair)


@triton.jit
def _normed(low, high, weight, eps, half: tl.constexpr, padded_half: tl.constexpr):
    """Normalize heads, [heads, half] or [half], that have zeros after their halves."""
    squares = tl.sum(low * low + high * high, axis=-1, keep_dims=True)
    inverse = tl.rsqrt(squares / (2 * half) + eps)
    at = tl.arange(0, padded_half)
    low_weight = tl.load(weight + at, mask=at < half, other=0.0)
    high_weight = tl.load(weight + half + at, mask=at < half, other=0.0)
    return low * inverse * low_weight, high * inverse * high_weight


@triton.jit
def _write_codes(place, scale_place, low, high, half: tl.constexpr, is_pair):
    """Mix a row, and write it in 8 bits and its scale, which is NaN if the row is not finite.

    Divisions are rounded to the nearest number, and products before sums, as on a CPU.
    """
    low, high = mixed(low[None, :], high[None, :], half)
    low, high = tl.reshape(low, is_pair.shape), tl.reshape(high, is_pair.shape)
    most = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=0)
    by = tl.where(most > 1e-30, tl.div_rn(127.0, most), 0.0)
    tl.store(place, _code(low * by), mask=is_pair)
    tl.store(place + half, _code(high * by), mask=is_pair)
    tl.store(scale_place, tl.div_rn(most, 127.0) + tl.sum(low * 0.0 + high * 0.0, axis=0))


@triton.jit
def _code(value):
    """Round to the nearest integer, the even one in a tie, as float32 addition does."""
    shift: tl.constexpr = 12582912.0  # 1.5 * 2 ** 23
    return tl.where(value == value, (value + shift) - shift, 0.0).to(tl.int8)
