"""Adds to the residual stream, and normalizes it by its root mean square."""

import torch
import triton
import triton.language as tl


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


@triton.jit
def _normalize(rows, weight, stride, size, eps, block: tl.constexpr):
    column = tl.arange(0, block)
    is_inside = column < size
    place = rows + tl.program_id(0).to(tl.int64) * stride + column
    values = tl.load(place, mask=is_inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
    values = values * inverse * tl.load(weight + column, mask=is_inside, other=0.0)
    tl.store(place, values.to(rows.dtype.element_ty), mask=is_inside)
