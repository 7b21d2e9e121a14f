"""Adds to the residual stream, and normalizes it by its root mean square."""

import torch
import triton
import triton.language as tl

_TILE_NUMBERS = 1024
"""Numbers of small groups that a program gates."""


def add_rms_norm(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    scale: float = 1.0,
    rows: torch.Tensor | None = None,
) -> None:
    """Add to the residual stream, then normalize it.

    Args:
        residual: float32 [T, E]; becomes `residual + scale * delta` unless `rows` are given.
        delta: [T, E]; None adds nothing.
        weight: float32 [E].
        out: [T, E], or [Q, E], in the model's dtype; written.
        rows: int32 [Q], rows to normalize, with repetitions; None for all.
    """
    size = residual.shape[1]
    _add_rms_norm[(len(out),)](
        residual,
        delta,
        weight,
        rows,
        out,
        size,
        eps,
        scale,
        block=triton.next_power_of_2(size),
        num_warps=num_warps(size),
    )


def normalize(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Normalize rows in place.

    Args:
        rows: [T, N], perhaps columns of a wider matrix.
        weight: float32 [N].
    """
    size = rows.shape[1]
    _normalize[(len(rows),)](
        rows,
        weight,
        rows.stride(0),
        size,
        eps,
        block=triton.next_power_of_2(size),
        num_warps=num_warps(size),
    )


def num_warps(size: int) -> int:
    """Return the warps of a program that keeps a row of `size` numbers in registers."""
    warps: int = min(max(triton.next_power_of_2(size) // 512, 1), 16)
    return warps


@triton.jit
def _add_rms_norm(residual, delta, weight, rows, out, size, eps, scale, block: tl.constexpr):
    program = tl.program_id(0)
    row = program if rows is None else tl.load(rows + program)
    column = tl.arange(0, block)
    is_inside = column < size
    place = row.to(tl.int64) * size + column
    values = tl.load(residual + place, mask=is_inside, other=0.0)
    if delta is not None:
        values += scale * tl.load(delta + place, mask=is_inside, other=0.0).to(tl.float32)
        if rows is None:
            tl.store(residual + place, values, mask=is_inside)
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
    values = values * inverse * tl.load(weight + column, mask=is_inside, other=0.0)
    tl.store(
        out + program.to(tl.int64) * size + column, values.to(out.dtype.element_ty), mask=is_inside
    )


def gate_rows(
    rows: torch.Tensor,
    gates: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    *,
    group_size: int,
    is_normed_first: bool,
) -> None:
    """Multiply rows with SiLU of gates, and normalize each group by its root mean square.

    Args:
        rows: float32 [P, size].
        gates: [P, size], a part of wider rows.
        weight: float32 [size], or [group_size] for all groups alike; None if nothing is
            normalized.
        out: [P, size]; written.
        is_normed_first: normalize before gating.
    """
    size = rows.shape[1]
    num_groups = rows.numel() // group_size
    block = triton.next_power_of_2(group_size)
    num_tile_groups = max(1, _TILE_NUMBERS // block)
    _gate_groups[(triton.cdiv(num_groups, num_tile_groups),)](
        rows,
        gates,
        weight,
        out,
        eps,
        gates.stride(0),
        num_groups,
        size // group_size,
        group_size,
        0 if weight is None else len(weight),
        is_normed_first=is_normed_first,
        num_tile_groups=num_tile_groups,
        block=block,
        num_warps=max(2, num_warps(group_size)),
    )


@triton.jit
def _gate_groups(
    rows,
    gates,
    weight,
    out,
    eps,
    gate_stride,
    num_groups,
    num_row_groups,
    group_size,
    num_weights,
    is_normed_first: tl.constexpr,
    num_tile_groups: tl.constexpr,
    block: tl.constexpr,
):
    group = tl.program_id(0) * num_tile_groups + tl.arange(0, num_tile_groups)
    index = tl.arange(0, block)
    is_inside = (group < num_groups)[:, None] & (index < group_size)[None, :]
    place = group.to(tl.int64)[:, None] * group_size + index[None, :]
    column = (group % num_row_groups * group_size)[:, None] + index[None, :]
    own_gates = gates + (group // num_row_groups).to(tl.int64)[:, None] * gate_stride + column
    gate = tl.load(own_gates, mask=is_inside, other=0.0).to(tl.float32)
    gate = gate * tl.sigmoid(gate)
    values = tl.load(rows + place, mask=is_inside, other=0.0)
    if weight is None or not is_normed_first:
        values *= gate
    if weight is not None:
        values *= tl.rsqrt(tl.sum(values * values, axis=1) / group_size + eps)[:, None]
        values *= tl.load(weight + column % num_weights, mask=is_inside, other=0.0)
        if is_normed_first:
            values *= gate
    tl.store(out + place, values.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _normalize(rows, weight, stride, size, eps, block: tl.constexpr):
    column = tl.arange(0, block)
    is_inside = column < size
    place = rows + tl.program_id(0).to(tl.int64) * stride + column
    values = tl.load(place, mask=is_inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
    values = values * inverse * tl.load(weight + column, mask=is_inside, other=0.0)
    tl.store(place, values.to(rows.dtype.element_ty), mask=is_inside)
