"""What comes between a layer's first projection and its attention, in one pass over its rows."""

import torch
import triton
import triton.language as tl

from legato.model.rope import RopeFrequencies


def rope_table(positions: torch.Tensor, inverse: torch.Tensor, scaling: float) -> torch.Tensor:
    """Cosines and sines of a step's rows, for all of its layers.

    Args:
        positions: int32 [P].
        inverse: float32 [D / 2], `RopeFrequencies.inverse` on the device.
        scaling: `RopeFrequencies.scaling`.

    Returns:
        float32 [P, 2, D / 2]: cosines, then sines.
    """
    angles = positions.to(torch.float32)[:, None] * inverse
    table = torch.empty(len(angles), 2, len(inverse), dtype=torch.float32, device=inverse.device)
    torch.cos(angles, out=table[:, 0])
    torch.sin(angles, out=table[:, 1])
    return table if scaling == 1.0 else table.mul_(scaling)


def inverse_frequencies(frequencies: RopeFrequencies, device: torch.device) -> torch.Tensor:
    """Float32 [D / 2], for `rope_table`."""
    return torch.tensor(frequencies.inverse, dtype=torch.float32, device=device)


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
) -> torch.Tensor:
    """Norm and turn queries and keys, and put keys and values into the cache.

    Args:
        qkv: [P, (H + 2K) * D], as the projection made it; its queries are overwritten.
        table: from `rope_table`.
        slot_mapping: int32 [P], block id * block size + offset; -1 where nothing is written.
        key_cache, value_cache: one layer's [num_blocks, K, block size, D].
        q_norm, k_norm: float32 [D], RMSNorm's weights a head, both or neither.

    Returns:
        The queries: [P, H, D], a view of `qkv`.
    """
    num_rows, width = qkv.shape
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    has_norm = q_norm is not None
    weights = (q_norm, k_norm) if has_norm else (table, table)
    if num_rows:
        _rotate_and_write[(num_rows * num_kv_heads,)](
            qkv,
            table,
            slot_mapping,
            *weights,
            key_cache,
            value_cache,
            eps,
            key_cache.stride(0),
            qkv.stride(0),
            num_kv_heads=num_kv_heads,
            group=num_heads // num_kv_heads,
            padded_group=triton.next_power_of_2(num_heads // num_kv_heads),
            half=head_dim // 2,
            padded_half=triton.next_power_of_2(head_dim // 2),
            block_size=block_size,
            has_norm=has_norm,
            num_warps=2,
        )
    return qkv[:, : num_heads * head_dim].view(num_rows, num_heads, head_dim)


@triton.jit
def _rotate_and_write(
    qkv,
    table,
    slot_mapping,
    q_norm,
    k_norm,
    key_cache,
    value_cache,
    eps,
    block_stride,
    row_stride,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    half: tl.constexpr,
    padded_half: tl.constexpr,
    block_size: tl.constexpr,
    has_norm: tl.constexpr,
):
    """A program has one row and one key head: its group's queries, its key and its value."""
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
    low = tl.load(query, mask=is_query, other=0.0).to(tl.float32)
    high = tl.load(query + half, mask=is_query, other=0.0).to(tl.float32)
    if has_norm:
        inverse = tl.rsqrt(tl.sum(low * low + high * high, axis=1) / head_dim + eps)[:, None]
        low = low * inverse * tl.load(q_norm + at, mask=is_pair, other=0.0)[None, :]
        high = high * inverse * tl.load(q_norm + half + at, mask=is_pair, other=0.0)[None, :]
    type = qkv.dtype.element_ty
    tl.store(query, (low * cos[None, :] - high * sin[None, :]).to(type), mask=is_query)
    tl.store(query + half, (high * cos[None, :] + low * sin[None, :]).to(type), mask=is_query)

    slot = tl.load(slot_mapping + row)
    if slot < 0:
        return
    key = heads + (num_heads + kv_head) * head_dim + at
    low = tl.load(key, mask=is_pair, other=0.0).to(tl.float32)
    high = tl.load(key + half, mask=is_pair, other=0.0).to(tl.float32)
    if has_norm:
        inverse = tl.rsqrt(tl.sum(low * low + high * high, axis=0) / head_dim + eps)
        low = low * inverse * tl.load(k_norm + at, mask=is_pair, other=0.0)
        high = high * inverse * tl.load(k_norm + half + at, mask=is_pair, other=0.0)
    place = (slot // block_size).to(tl.int64) * block_stride
    place += (kv_head * block_size + slot % block_size) * head_dim
    tl.store(key_cache + place + at, (low * cos - high * sin).to(type), mask=is_pair)
    tl.store(key_cache + place + half + at, (high * cos + low * sin).to(type), mask=is_pair)
    value = key + num_kv_heads * head_dim
    tl.store(value_cache + place + at, tl.load(value, mask=is_pair), mask=is_pair)
    tl.store(value_cache + place + half + at, tl.load(value + half, mask=is_pair), mask=is_pair)
