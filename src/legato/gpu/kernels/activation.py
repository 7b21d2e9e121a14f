"""The gated activations of an MLP, and of attention's heads."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Compute SiLU of the gates times the up projections.

    Args:
        gate_up: [T, 2I], gates first.
        out: [T, I]; written.
    """
    num_rows, size = out.shape
    _silu_mul[num_rows, triton.cdiv(size, _BLOCK)](gate_up, out, size, block=_BLOCK)


@triton.jit
def _silu_mul(gate_up, out, size, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=is_inside).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * size + column, mask=is_inside).to(tl.float32)
    gated = gate * tl.sigmoid(gate) * up
    tl.store(out + row * size + column, gated.to(out.dtype.element_ty), mask=is_inside)


def gate_heads(gates: torch.Tensor, heads: torch.Tensor) -> None:
    """Multiply the outputs of heads with sigmoids.

    Args:
        gates: [T, size], a part of wider rows.
        heads: [T, size]; changed.
    """
    num_rows, size = heads.shape
    blocks = triton.cdiv(size, _BLOCK)
    _gate_heads[num_rows, blocks](gates, heads, gates.stride(0), size, block=_BLOCK)


@triton.jit
def _gate_heads(gates, heads, gate_stride, size, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = column < size
    gate = tl.load(gates + row * gate_stride + column, mask=is_inside).to(tl.float32)
    place = heads + row * size + column
    values = tl.load(place, mask=is_inside).to(tl.float32) * tl.sigmoid(gate)
    tl.store(place, values.to(heads.dtype.element_ty), mask=is_inside)
