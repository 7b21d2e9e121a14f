"""The gated activations of an MLP, and of attention's heads."""

import torch
import triton
import triton.language as tl

from legato.model.mlp_spec import Activation

_BLOCK = 1024


def apply_gates(gate_up: torch.Tensor, out: torch.Tensor, activation: Activation) -> None:
    """Compute the activation of the gates times the up projections.

    Args:
        gate_up: [T, 2I], gates first.
        out: [T, I]; written.
        activation: silu, gelu_tanh or relu2.
    """
    num_rows, size = out.shape
    _apply_gates[num_rows, triton.cdiv(size, _BLOCK)](
        gate_up, out, size, activation=activation, block=_BLOCK
    )


@triton.jit
def at_least(values, limit):
    """Return the larger of each value and the limit; NaN for NaN, which `tl.maximum` drops."""
    return tl.where(values < limit, limit, values)


@triton.jit
def at_most(values, limit):
    """Return the smaller of each value and the limit; NaN for NaN."""
    return tl.where(values > limit, limit, values)


@triton.jit
def activate(values, activation: tl.constexpr):
    """Map float32 of any shape, NaN to NaN; with tanh(y) = 2 * sigmoid(2y) - 1."""
    if activation == "relu2":
        factor = at_least(values, 0.0)
    elif activation == "gelu_tanh":
        factor = tl.sigmoid(1.5957691216057308 * (values + 0.044715 * values * values * values))
    else:
        factor = tl.sigmoid(values)
    return values * factor


@triton.jit
def _apply_gates(gate_up, out, size, activation: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=is_inside).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * size + column, mask=is_inside).to(tl.float32)
    gated = activate(gate, activation) * up
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
