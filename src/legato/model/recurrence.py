"""Recurrent mixers: layers that keep a state of a fixed size instead of keys and values.

Attribute names are those of transformers' checkpoints, within `recurrence` for all kinds.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from legato.model.linear import Linear, MakeEmpty
from legato.model.mixer_spec import ShortConvSpec
from legato.model.states import StateRun, StepStates

PIECE = 64
"""Recurrences are computed in pieces that end at multiples of this position: where a request is cut
there, its states are bitwise the same."""


class Convolution(nn.Module):
    """A causal convolution of each channel over its last inputs."""

    def __init__(self, num_channels: int, kernel_size: int, bias: bool, empty: MakeEmpty) -> None:
        super().__init__()
        self.weight = nn.Parameter(empty(num_channels, 1, kernel_size), requires_grad=False)
        self.bias = nn.Parameter(empty(num_channels), requires_grad=False) if bias else None

    def forward(self, rows: torch.Tensor, states: StepStates, layer: int) -> torch.Tensor:
        """Map [T, C] to float32 [T, C]; `layer` is an index among the recurrent layers."""
        return states.convolve(layer, rows, self.weight, self.bias)


class RecurrentMixer(nn.Module):
    """A mixer that keeps a state, between two projections.

    Attributes:
        layer: its index among the recurrent layers.
        native: computes what `mixed` does; None for PyTorch's operators.
    """

    in_proj: Linear
    conv: Convolution
    out_proj: Linear

    def __init__(self, state_layer: int) -> None:
        super().__init__()
        self.layer = state_layer
        self.native: Callable[[torch.Tensor, StepStates, int], torch.Tensor] | None = None

    def forward(self, hidden: torch.Tensor, states: StepStates) -> torch.Tensor:
        """Map [P, E] to [P, E]; rows after the step's runs are padding."""
        projected = self.project(hidden, states)
        if self.native is None:
            mixed = self.mixed(projected, states)
        else:
            mixed = self.native(projected, states, self.layer)
        output: torch.Tensor = self.out_proj(states.padded(mixed, len(hidden)))
        return output

    def project(self, hidden: torch.Tensor, states: StepStates) -> torch.Tensor:
        """Return the first projection of the rows that are not padding."""
        projected: torch.Tensor = self.in_proj(hidden)[: states.num_rows]
        return projected

    def mixed(self, projected: torch.Tensor, states: StepStates) -> torch.Tensor:
        """Advance the states by projected rows [T, ...], and return rows for `out_proj`."""
        raise NotImplementedError


class ShortConv(RecurrentMixer):
    """LFM2's gated short convolution (Liquid AI, 2025, arXiv:2511.23404)."""

    def __init__(
        self, own: ShortConvSpec, hidden_size: int, state_layer: int, empty: MakeEmpty
    ) -> None:
        super().__init__(state_layer)
        self.conv = Convolution(own.num_channels, own.kernel_size, own.has_bias, empty)
        self.in_proj = Linear(hidden_size, 3 * own.num_channels, own.has_bias, empty)
        self.out_proj = Linear(own.num_channels, hidden_size, own.has_bias, empty)

    def mixed(self, projected: torch.Tensor, states: StepStates) -> torch.Tensor:
        before, after, inputs = projected.chunk(3, dim=-1)
        convolved = self.conv(before * inputs, states, self.layer).to(after.dtype)
        result: torch.Tensor = after * convolved
        return result


def scan(
    rows: Sequence[torch.Tensor],
    states: StepStates,
    layer: int,
    token_form: Callable[..., torch.Tensor],
    chunk_form: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Run a recurrence over a step's runs, from each request's state to its next one.

    Args:
        rows: [T, ...], what the recurrence reads of each token. The first has the outputs' shape.
        layer: index among the recurrent layers.
        token_form: takes such rows [N, ...] of as many requests, and their states.
        chunk_form: takes such rows of one request, and its state. Both forms change states in
            place, and return the outputs.
    """
    recurrent, output = states.layers[layer].recurrent, torch.empty_like(rows[0])
    for run in states.runs:
        slot = run.source
        for piece, kept in pieces(run):
            # In the slot itself: a copy of many states would be new memory, which is slow to touch.
            state = recurrent[kept]
            if kept != slot:
                state.copy_(recurrent[slot])
                slot = kept
            own = [part[piece] for part in rows]
            is_one = len(own[0]) == 1
            output[piece] = token_form(*own, state[None]) if is_one else chunk_form(*own, state)
    return output


def in_float64(
    function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor
) -> torch.Tensor:
    """Return a function of each number [T, H], rounded to float32.

    In float32, PyTorch's vectors and what is left of a tensor after the last whole vector round
    differently, so that a row's values would depend on its place in the step.
    """
    return function(rows.double()).float()


def decays(gate: torch.Tensor) -> torch.Tensor:
    """Return exp of the sum of gates after token j up to token i, 0 for j > i: [H, C, C].

    Each sum is added up on its own. A difference of two long sums would have lost what a small gate
    adds behind a large one.

    Args:
        gate: [H, C], none positive.
    """
    num_tokens = gate.shape[-1]
    ones = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=gate.device)
    later = gate[..., None].masked_fill(~ones.tril(-1), 0.0)
    return later.cumsum(-2).exp().masked_fill(~ones.tril(), 0.0)


def pieces(run: StateRun) -> Iterator[tuple[slice, int]]:
    """Yield the rows of each piece of a run, and the slot that it writes."""
    start = run.start
    for kept_end, slot in run.kept:
        while start < kept_end:
            position = run.position + start - run.start
            end = min(kept_end, start + PIECE - position % PIECE)
            yield slice(start, end), slot
            start = end
