"""Packed paged attention: one kernel for all kinds of rows in a step (`work_items`).

A program computes an item for one key head, then others if there are fewer programs. The softmax is
updated along the keys (Milakov and Gimelshein, 2018, arXiv:1805.02867), in powers of two. If an
item is a part of a tile's keys, the logarithm of its denominator is stored beside its result, and
`merge_parts` merges parts in order.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from legato.gpu.kernels.attention_parts import LOG2_E, AttentionScratch, merge_parts
from legato.gpu.kernels.cache import scales_of
from legato.gpu.kernels.target import multiplies_from_shared_memory
from legato.gpu.work_items import ITEM_FIELDS, WIDE_ROWS, WorkList

_TILE_DIMS = (64, 128)
"""Sizes of heads whose blocks are loaded as tiles."""


def attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    work: Sequence[WorkList],
    out: torch.Tensor,
    scratch: AttentionScratch,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally in the cache, which already has the step's own keys and values.

    Args:
        query: [P, H, D], heads contiguous.
        key_cache, value_cache: one layer's [num_blocks, K, block size, D] in the query's dtype, or
            quantized: int8 [num_blocks, K, block size, D + SCALE_BYTES]. In both, a head's part of
            a block is laid out as `CacheSpec` says, with its tokens in order. Quantized heads are
            mixed, and so are queries and results.
        block_table: int32 [slots, max blocks].
        work: the step's items, from `work_lists`.
        out: [P, H, D] in the query's dtype, contiguous. Rows without an item are not written.
        scale, softcap: see `StepAttention.attend`.
        sliding_window: likewise; at most the width that the items were made for.
        sinks: float32 [H], the logit of one more key for each head, whose value is zero; None
            without any (Xiao et al., 2023, arXiv:2309.17453).

    Returns:
        `out`.
    """
    for part in work:
        if part.programs.num_items:
            _attend_list(
                query,
                key_cache,
                value_cache,
                block_table,
                part,
                out,
                scratch,
                scale,
                sliding_window,
                softcap,
                sinks,
            )
    return out


def _attend_list(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    work: WorkList,
    out: torch.Tensor,
    scratch: AttentionScratch,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    _, num_heads, head_dim = query.shape
    num_blocks, num_kv_heads, block_size, _ = key_cache.shape
    padded_dim = triton.next_power_of_2(head_dim)
    caches = key_cache, value_cache
    is_quantized = key_cache.dtype == torch.int8
    # A window or a cap takes the registers that make two programs fit.
    is_plain = sliding_window is None and softcap is None and not is_quantized
    is_wide = work.shape.product_rows >= WIDE_ROWS
    has_tiles = is_plain and is_wide and _loads_tiles(query.dtype, head_dim, block_size)
    if has_tiles:
        how = _WITH_TILES
        rows = [num_blocks * num_kv_heads * block_size, head_dim]
        tile = [how.num_keys, head_dim]
        loaded = [TensorDescriptor(cache, rows, [head_dim, 1], tile) for cache in caches]
    else:
        how = _how(work.shape.product_rows, padded_dim, query.dtype, is_quantized=is_quantized)
        loaded = [*caches]
    _attend_items[(num_kv_heads * work.programs.num_items,)](
        query,
        *loaded,
        *(scales_of(cache) if is_quantized else cache for cache in caches),
        block_table,
        work.counts,
        work.items,
        out,
        *scratch,
        sinks,
        (scale if softcap is None else softcap) * LOG2_E.value,
        0.0 if softcap is None else scale / softcap,
        sliding_window or 0,
        query.stride(0),
        block_table.stride(0),
        key_cache.stride(0),
        num_kv_heads=num_kv_heads,
        group=num_heads // num_kv_heads,
        head_dim=head_dim,
        padded_dim=padded_dim,
        block_size=block_size,
        is_quantized=is_quantized,
        has_tiles=has_tiles,
        product_rows=work.shape.product_rows,
        num_keys=how.num_keys,
        has_window=sliding_window is not None,
        has_cap=softcap is not None,
        wide_rows=WIDE_ROWS,
        item_fields=ITEM_FIELDS,
        num_warps=how.num_warps,
        num_stages=how.num_stages,
    )
    merge_parts(out, scratch, work, sinks)


class _How(NamedTuple):
    """Compile options: keys of a product, warps, and pipeline stages of loads."""

    num_keys: int
    num_warps: int
    num_stages: int


_WITH_TILES = _How(64, 4, 3)


def _loads_tiles(dtype: torch.dtype, head_dim: int, block_size: int) -> bool:
    """Whether the GPU copies the keys of a product, which lie in one block, as one tile.

    It needs no registers for addresses, so that programs of 4 warps compute a product of 128 rows
    and two of them share a processor: one multiplies while the other one weighs. Some registers
    are spilled, and it is still faster: on an H200, 475 TFLOP/s for a prompt of 8,192, where 8
    warps without tiles had 384.
    """
    is_in_one_block = block_size % _WITH_TILES.num_keys == 0
    is_fitting = dtype.itemsize == 2 and head_dim in _TILE_DIMS
    return is_in_one_block and is_fitting and multiplies_from_shared_memory()


def _how(product_rows: int, head_dim: int, dtype: torch.dtype, *, is_quantized: bool) -> _How:
    """Return the largest options that fit into registers and shared memory.

    As many programs fit onto a processor as `work_items` assumes. The block table is read before
    the keys and values that it names: of five stages, three are for these.

    Args:
        head_dim: padded.
        dtype: of queries, and of keys once they are widened.
    """
    row_bytes = head_dim * dtype.itemsize
    if is_quantized or dtype == torch.float32:
        row_bytes *= 2  # a thread keeps codes beside what they stand for, or float32 as operands
    if product_rows < WIDE_ROWS:
        # An Ampere has less shared memory; wider or widened keys take more registers.
        is_roomy = multiplies_from_shared_memory() and dtype.itemsize == 2 and not is_quantized
        return _How(_keys_of(16 * 1024, row_bytes), 4, 5 if is_roomy else 4)
    if multiplies_from_shared_memory():
        return _How(_keys_of(16 * 1024, row_bytes), 8, 5)
    # Both operands and the results are kept in registers.
    return _How(_keys_of(8 * 1024, row_bytes), 8, 5 if row_bytes <= 256 else 4)


def _keys_of(num_bytes: int, row_bytes: int) -> int:
    return max(16, min(64, num_bytes // row_bytes))


# The alignment of a step's inputs depends on its size; do not compile for each alignment.
@triton.jit(do_not_specialize_on_alignment=["counts", "items"])
def _attend_items(
    query,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    block_table,
    counts,
    items,
    out,
    partial,
    log_sum,
    sinks,
    scale,
    cap_scale,
    window,
    query_stride,
    table_stride,
    block_stride,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    is_quantized: tl.constexpr,
    has_tiles: tl.constexpr,
    product_rows: tl.constexpr,
    num_keys: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
    wide_rows: tl.constexpr,
    item_fields: tl.constexpr,
):
    kv_head = tl.program_id(0) % num_kv_heads
    index = tl.program_id(0) // num_kv_heads
    num_items = tl.load(counts)
    if index >= num_items:
        return
    if product_rows >= wide_rows:
        # A loop over items takes registers that a wide item needs.
        _attend_item(
            query, key_cache, value_cache, key_scales, value_scales, block_table,
            items + index * item_fields, kv_head, out, partial, log_sum, sinks, scale, cap_scale,
            window, query_stride, table_stride, block_stride, num_kv_heads, group, head_dim,
            padded_dim, block_size, is_quantized, has_tiles, product_rows, num_keys, has_window,
            has_cap, wide_rows,
        )  # fmt: skip
    else:
        stride = tl.num_programs(0) // num_kv_heads
        for narrow in tl.range(index, num_items, stride, disable_licm=True):
            _attend_item(
                query, key_cache, value_cache, key_scales, value_scales, block_table,
                items + narrow * item_fields, kv_head, out, partial, log_sum, sinks, scale,
                cap_scale, window, query_stride, table_stride, block_stride, num_kv_heads, group,
                head_dim, padded_dim, block_size, is_quantized, has_tiles, product_rows, num_keys,
                has_window, has_cap, wide_rows,
            )  # fmt: skip


@triton.jit
def _attend_item(
    query,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    block_table,
    item,
    kv_head,
    out,
    partial,
    log_sum,
    sinks,
    scale,
    cap_scale,
    window,
    query_stride,
    table_stride,
    block_stride,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    is_quantized: tl.constexpr,
    has_tiles: tl.constexpr,
    product_rows: tl.constexpr,
    num_keys: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
    wide_rows: tl.constexpr,
):
    num_heads: tl.constexpr = group * num_kv_heads
    # Rows of the product: heads of the group for the first row, then for the second, and so on.
    row = tl.arange(0, product_rows) // group
    head = kv_head * group + tl.arange(0, product_rows) % group
    dim = tl.arange(0, padded_dim)
    head_numbers: tl.constexpr = block_size * (head_dim + (4 if is_quantized else 0))
    keys = key_cache if has_tiles else key_cache + kv_head * head_numbers
    values = value_cache if has_tiles else value_cache + kv_head * head_numbers
    first_scale = kv_head * (head_numbers // 4) + block_size * head_dim // 4
    key_scales += first_scale
    value_scales += first_scale

    table = block_table + tl.load(item).to(tl.int64) * table_stride
    first_row = tl.load(item + 1)
    num_rows = tl.load(item + 2)
    position = tl.load(item + 3)
    first_key = tl.load(item + 4)
    end_key = tl.load(item + 5)
    scratch_row = tl.load(item + 6)

    is_row = (row < num_rows)[:, None] & (dim < head_dim)[None, :]
    rows = query + (first_row + row).to(tl.int64)[:, None] * query_stride
    q = tl.load(rows + head[:, None] * head_dim + dim[None, :], mask=is_row, other=0.0)
    row_position = position + row

    top = tl.full([product_rows], -1e30, tl.float32)
    total = tl.zeros([product_rows], tl.float32)
    if sinks is not None and scratch_row < 0:  # otherwise they are merged
        top = tl.load(sinks + head) * LOG2_E
        total += 1.0
    acc = tl.zeros([product_rows, padded_dim], tl.float32)

    if has_window:
        first_key = tl.maximum(first_key, position + 1 - window)
    low = first_key // num_keys * num_keys if block_size % num_keys == 0 else first_key
    if product_rows >= wide_rows and not has_window:
        # All rows see these keys, so no mask is needed. A narrow item has too few keys for two
        # loops, and the second loop would wait for memory again.
        num_whole = tl.maximum(tl.minimum(position + 1, end_key) - low, 0) // num_keys
        for start in range(low, low + num_whole * num_keys, num_keys):
            acc, top, total = _add_keys(
                acc, top, total, q, keys, values, key_scales, value_scales, table, kv_head,
                start, first_key, end_key, row_position, scale, cap_scale, window,
                block_stride, num_kv_heads, head_dim, padded_dim, block_size, is_quantized,
                has_tiles, num_keys, has_window, has_cap, False,
            )  # fmt: skip
        low += num_whole * num_keys
    for start in range(low, end_key, num_keys):
        acc, top, total = _add_keys(
            acc, top, total, q, keys, values, key_scales, value_scales, table, kv_head, start,
            first_key, end_key, row_position, scale, cap_scale, window, block_stride,
            num_kv_heads, head_dim, padded_dim, block_size, is_quantized, has_tiles, num_keys,
            has_window, has_cap, True,
        )  # fmt: skip

    # A row that sees none of a part's keys has zeros there, with weight 0.
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if scratch_row < 0:
        whole = (first_row + row).to(tl.int64) * num_heads + head
        place = out + whole[:, None] * head_dim + dim[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=is_row)
    else:
        part = (scratch_row + row) * num_heads + head
        tl.store(partial + part[:, None] * head_dim + dim[None, :], result, mask=is_row)
        tl.store(log_sum + part, top + tl.log2(total), mask=row < num_rows)


@triton.jit
def _add_keys(
    acc,
    top,
    total,
    q,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    kv_head,
    start,
    first_key,
    end_key,
    row_position,
    scale,
    cap_scale,
    window,
    block_stride,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    is_quantized: tl.constexpr,
    has_tiles: tl.constexpr,
    num_keys: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
    is_masked: tl.constexpr,
):
    """Extend the attention over earlier keys by those of [start, start + num_keys) in the item."""
    key = start + tl.arange(0, num_keys)
    is_key = key < end_key
    if has_window:
        is_key &= key >= first_key
    k, v, of_scales = _load_keys(
        keys, values, table, kv_head, start, is_key, block_stride, num_kv_heads, head_dim,
        padded_dim, block_size, has_tiles, num_keys, is_masked,
    )  # fmt: skip
    scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    if is_quantized:
        scores *= tl.load(key_scales + of_scales, mask=is_key, other=0.0)[None, :]
    if has_cap:
        scores = _tanh(scores * cap_scale)
    if is_masked:
        visible = is_key[None, :] & (key[None, :] <= row_position[:, None])
        if has_window:
            visible &= key[None, :] > row_position[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
    weight = tl.exp2(scores * scale - new_top[:, None])
    kept = tl.exp2(top - new_top)
    total = total * kept + tl.sum(weight, axis=1)
    if is_quantized:
        # Relative to the largest scale, since small scales vanish in float16.
        scales = tl.load(value_scales + of_scales, mask=is_key, other=0.0)
        largest = tl.maximum(tl.max(scales, axis=0), 1e-30)
        weight *= (scales / largest)[None, :]
    product = tl.dot(weight.to(q.dtype), v.to(q.dtype), input_precision="ieee")
    if is_quantized:
        product *= largest
    return acc * kept[:, None] + product, new_top, total


@triton.jit
def _load_keys(
    keys,
    values,
    table,
    kv_head,
    start,
    is_key,
    block_stride,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    has_tiles: tl.constexpr,
    num_keys: tl.constexpr,
    is_masked: tl.constexpr,
):
    """Return keys [D, num_keys], values [num_keys, D] and the index of their scales.

    Memory beside the item's keys may never have been written, and zero times it may be NaN: masked
    values are zeros. Keys need none, since their scores are masked.
    """
    index = tl.arange(0, num_keys)
    if block_size % num_keys == 0:
        # All lie in one block: its place is read once, and needs no registers for each key.
        block = tl.load(table + start // block_size).to(tl.int64)
        first = start % block_size
        of_scales = block * (block_stride // 4) + first + index
        if not has_tiles:
            keys += block * block_stride + first * head_dim
            values += block * block_stride + first * head_dim
        place = index * head_dim
    else:
        key = start + index
        block = tl.load(table + key // block_size, mask=is_key, other=0).to(tl.int64)
        of_scales = block * (block_stride // 4) + key % block_size
        place = block * block_stride + (key % block_size) * head_dim
    dim = tl.arange(0, padded_dim)
    if has_tiles:
        row = ((block * num_kv_heads + kv_head) * block_size + first).to(tl.int32)
        k, v = tl.trans(keys.load([row, 0])), values.load([row, 0])
        if is_masked:
            v = tl.where(is_key[:, None], v, 0.0)
    elif is_masked or head_dim < padded_dim:
        there = is_key[:, None] & (dim < head_dim)[None, :]
        k = tl.load(keys + place[None, :] + dim[:, None], mask=tl.trans(there), other=0.0)
        v = tl.load(values + place[:, None] + dim[None, :], mask=there, other=0.0)
    else:
        k = tl.load(keys + place[None, :] + dim[:, None])
        v = tl.load(values + place[:, None] + dim[None, :])
    return k, v, of_scales


@triton.jit
def _tanh(values):
    """Return the hyperbolic tangent, with an error of 1e-7; there is none in Triton's language."""
    power = tl.exp2(tl.abs(values) * (-2.0 * LOG2_E))
    size = (1.0 - power) / (1.0 + power)
    return tl.where(values < 0.0, -size, size)
