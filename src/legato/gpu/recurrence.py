"""Recurrent mixers on a GPU: what they compute between their projections, in a few kernels."""

import torch

from legato.gpu.kernels.convolution import convolve
from legato.gpu.kernels.norm import gate_rows
from legato.gpu.kernels.recurrence import Gates, RecurrenceRule, advance
from legato.gpu.state_work import StateWork
from legato.model.delta_net import DeltaNet
from legato.model.mamba2 import Mamba2
from legato.model.recurrence import Convolution, RecurrentMixer, ShortConv
from legato.model.states import LayerStates


def mix(
    mixer: RecurrentMixer, projected: torch.Tensor, work: StateWork, states: LayerStates
) -> torch.Tensor:
    """Advance a layer's states by projected rows.

    Numbers are float32 in between, as in `legato.model.native_recurrence`.

    Args:
        projected: [P, ...], from the mixer's first projection; may be changed.
        work: the step's runs; rows outside of them are padding.

    Returns:
        [P, ...] in the dtype of `projected`, for the mixer's last projection; any numbers for
        padding.
    """
    match mixer:
        case ShortConv():
            out = projected.new_empty(len(projected), projected.shape[1] // 3)
            conv = mixer.conv
            convolve(projected, states.inputs, conv.weight, conv.bias, work, out, is_gated=True)
            return out
        case DeltaNet():
            return _delta_net(mixer, projected, work, states)
        case Mamba2():
            return _mamba2(mixer, projected, work, states)
        case _:
            raise AssertionError("the GPU's kernels do not know the mixer")


def _delta_net(
    mixer: DeltaNet, projected: torch.Tensor, work: StateWork, states: LayerStates
) -> torch.Tensor:
    """Rows are [queries, keys, values, z, b, a]."""
    size, key_size = mixer.num_heads * mixer.value_dim, mixer.num_key_heads * mixer.key_dim
    sizes = [2 * key_size + size, size, mixer.num_heads, mixer.num_heads]
    inputs, z, b, a = torch.split(projected, sizes, dim=-1)
    rule = RecurrenceRule(
        is_delta=True,
        num_heads=mixer.num_heads,
        num_key_heads=mixer.num_key_heads,
        key_dim=mixer.key_dim,
        value_dim=mixer.value_dim,
        first_query=0,
        first_key=key_size,
        first_value=2 * key_size,
    )
    rows = _convolved(mixer.conv, inputs, work, states)
    mixed = rows.new_empty(len(rows), size)
    gates = Gates(steps=a, weights=b, rates=mixer.A_log, bias=mixer.dt_bias)
    advance(rule, rows, gates, states.recurrent, work, mixed)
    out = projected.new_empty(mixed.shape)
    norm = mixer.norm
    gate_rows(
        mixed, z, norm.weight, norm.eps, out, group_size=mixer.value_dim, is_normed_first=True
    )
    return out


def _mamba2(
    mixer: Mamba2, projected: torch.Tensor, work: StateWork, states: LayerStates
) -> torch.Tensor:
    """Rows are [z, x, B, C, dt]."""
    size = mixer.num_heads * mixer.head_dim
    shared_size = mixer.num_groups * mixer.state_size
    sizes = [size, size + 2 * shared_size, mixer.num_heads]
    z, inputs, steps = torch.split(mixer.scaled(projected), sizes, dim=-1)
    rule = RecurrenceRule(
        is_delta=False,
        num_heads=mixer.num_heads,
        num_key_heads=mixer.num_groups,
        key_dim=mixer.state_size,
        value_dim=mixer.head_dim,
        first_query=size + shared_size,
        first_key=size,
        first_value=0,
        shortest=mixer.limits[0],
        longest=mixer.limits[1],
    )
    rows = _convolved(mixer.conv, inputs, work, states)
    mixed = rows.new_empty(len(rows), size)
    gates = Gates(steps, None, rates=mixer.A_log, bias=mixer.dt_bias, skips=mixer.D)
    advance(rule, rows, gates, states.recurrent, work, mixed)
    if mixer.has_shared_norm:
        return mixer.gated(mixed, projected).to(projected.dtype)
    out = projected.new_empty(mixed.shape)
    norm = mixer.norm
    gate_rows(
        mixed,
        z,
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        out,
        group_size=size // mixer.num_groups,
        is_normed_first=mixer.is_normed_first,
    )
    return out


def _convolved(
    conv: Convolution, inputs: torch.Tensor, work: StateWork, states: LayerStates
) -> torch.Tensor:
    """Return SiLU of the convolution, float32 [P, channels]."""
    out = inputs.new_empty(inputs.shape, dtype=torch.float32)
    convolve(inputs, states.inputs, conv.weight, conv.bias, work, out)
    return out
