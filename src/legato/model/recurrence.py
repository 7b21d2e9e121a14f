"""Recurrent mixers: layers that keep a state of a fixed size instead of keys and values.

Attribute names are those of transformers' checkpoints, within `recurrence` for all kinds.
"""

import torch
from torch import nn

from legato.model.layers import Linear, MakeEmpty
from legato.model.spec import DecoderSpec, ShortConvSpec
from legato.model.states import StepStates


class Convolution(nn.Module):
    """A causal convolution of each channel over its last inputs."""

    def __init__(self, num_channels: int, kernel_size: int, bias: bool, empty: MakeEmpty) -> None:
        super().__init__()
        self.weight = nn.Parameter(empty(num_channels, 1, kernel_size), requires_grad=False)
        self.bias = nn.Parameter(empty(num_channels), requires_grad=False) if bias else None

    def forward(self, rows: torch.Tensor, states: StepStates, layer: int) -> torch.Tensor:
        """Map [T, C] to float32 [T, C]; `layer` is an index among the recurrent layers."""
        return states.convolve(layer, rows, self.weight, self.bias)


class ShortConv(nn.Module):
    """LFM2's gated short convolution (Liquid AI, 2025, arXiv:2511.23404)."""

    def __init__(
        self, own: ShortConvSpec, hidden_size: int, state_layer: int, empty: MakeEmpty
    ) -> None:
        super().__init__()
        self.layer = state_layer
        self.conv = Convolution(hidden_size, own.kernel_size, own.has_bias, empty)
        self.in_proj = Linear(hidden_size, 3 * hidden_size, own.has_bias, empty)
        self.out_proj = Linear(hidden_size, hidden_size, own.has_bias, empty)

    def forward(self, hidden: torch.Tensor, states: StepStates) -> torch.Tensor:
        """Map [P, E] to [P, E]; rows after the step's runs are padding."""
        before, after, inputs = self.in_proj(hidden)[: states.num_rows].chunk(3, dim=-1)
        mixed = after * self.conv(before * inputs, states, self.layer).to(after.dtype)
        output: torch.Tensor = self.out_proj(states.padded(mixed, len(hidden)))
        return output


def make_recurrence(spec: DecoderSpec, layer: int, empty: MakeEmpty) -> nn.Module:
    """Make the recurrent mixer of a layer that has one."""
    own, state_layer = spec.layers[layer].recurrence, spec.state_layer(layer)
    assert own is not None
    return ShortConv(own, spec.hidden_size, state_layer, empty)
