"""Results of parts of a tile's keys, and how they become one."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from legato.gpu.work_items import MERGE_FIELDS, WorkList, WorkShape

LOG2_E = tl.constexpr(math.log2(math.e))
_MERGED_AT_ONCE = 32
"""Parts of a single row in a program's registers. With several rows, parts come one by one: on an
H200, that took 10 µs instead of 56 for 512 rows of 32 heads in two parts."""


class AttentionScratch(NamedTuple):
    """Results of parts, until they are merged.

    Attributes:
        partial: float32 [rows, H, D].
        log_sum: float32 [rows, H], in base 2.
    """

    partial: torch.Tensor
    log_sum: torch.Tensor


def make_scratch(
    shape: WorkShape, *, num_heads: int, head_dim: int, device: torch.device
) -> AttentionScratch:
    """Allocate scratch for steps of this shape; its size does not depend on their rows."""
    num_rows = max(part.scratch_rows for part in shape)
    return AttentionScratch(
        torch.empty(num_rows, num_heads, head_dim, dtype=torch.float32, device=device),
        torch.empty(num_rows, num_heads, dtype=torch.float32, device=device),
    )


def merge_parts(
    out: torch.Tensor, scratch: AttentionScratch, work: WorkList, sinks: torch.Tensor | None
) -> None:
    """Merge the parts of all tiles of a list whose keys are split; arguments as for `attend`."""
    _, num_heads, head_dim = out.shape
    shape, num_programs = work.shape, work.programs.num_merges
    if not num_programs:
        return
    _merge_parts[(num_heads * num_programs,)](
        out,
        *scratch,
        work.counts,
        work.merges,
        sinks,
        num_heads=num_heads,
        head_dim=head_dim,
        padded_dim=triton.next_power_of_2(head_dim),
        tile_rows=shape.tile_rows,
        merge_rows=shape.merge_rows,
        num_parts_at_once=_MERGED_AT_ONCE if shape.merge_rows == 1 else 1,
        merge_fields=MERGE_FIELDS,
        num_warps=4,
    )


# The alignment of a step's inputs depends on its size; do not compile for each alignment.
@triton.jit(do_not_specialize_on_alignment=["counts", "merges"])
def _merge_parts(
    out,
    partial,
    log_sum,
    counts,
    merges,
    sinks,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    tile_rows: tl.constexpr,
    merge_rows: tl.constexpr,
    num_parts_at_once: tl.constexpr,
    merge_fields: tl.constexpr,
):
    """Merge all parts of a few rows, for one head; then of the next such rows."""
    head = tl.program_id(0) % num_heads
    row = tl.arange(0, merge_rows)
    dim = tl.arange(0, padded_dim)
    is_dim = dim < head_dim
    num_merges = tl.load(counts + 1)
    stride = tl.num_programs(0) // num_heads
    # What does not change stays in the loop: it would take registers.
    for index in tl.range(tl.program_id(0) // num_heads, num_merges, stride, disable_licm=True):
        merge = merges + index * merge_fields
        first_row = tl.load(merge)
        is_row = row < tl.load(merge + 1)
        scratch_row = tl.load(merge + 2)
        num_parts = tl.load(merge + 3)
        top = tl.full([merge_rows], -1e30, tl.float32)
        total = tl.zeros([merge_rows], tl.float32)
        if sinks is not None:
            top = tl.zeros([merge_rows], tl.float32) + tl.load(sinks + head) * LOG2_E
            total += 1.0
        acc = tl.zeros([merge_rows, padded_dim], tl.float32)
        for first in range(0, num_parts, num_parts_at_once):
            part = first + tl.arange(0, num_parts_at_once)
            is_there = (part < num_parts)[:, None] & is_row[None, :]  # [parts, rows]
            at = (scratch_row + part[:, None] * tile_rows + row[None, :]) * num_heads + head
            logs = tl.load(log_sum + at, mask=is_there, other=float("-inf"))
            results = tl.load(
                partial + at[:, :, None] * head_dim + dim[None, None, :],
                mask=is_there[:, :, None] & is_dim[None, None, :],
                other=0.0,
            )
            new_top = tl.maximum(top, tl.max(logs, axis=0))
            weight = tl.exp2(logs - new_top[None, :])
            kept = tl.exp2(top - new_top)
            acc = acc * kept[:, None] + tl.sum(weight[:, :, None] * results, axis=0)
            total = total * kept + tl.sum(weight, axis=0)
            top = new_top
        at = (first_row + row).to(tl.int64) * num_heads + head
        place = out + at[:, None] * head_dim + dim[None, :]
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(place, result, mask=is_row[:, None] & is_dim[None, :])
