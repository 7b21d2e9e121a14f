"""Mamba-2: a linear recurrence whose steps, inputs and outputs are chosen by each token.

Dao and Gu, 2024, arXiv:2405.21060. For each token and head, with a step dt > 0, a rate A < 0, an
input x [P] and vectors B and C [N], which heads of a group share, the state S [P, N] follows

    S <- exp(A dt) S + dt x B^T;  y = S C + D x

in float32.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from legato.model.communicator import Communicator
from legato.model.linear import Linear, MakeEmpty, RMSNorm
from legato.model.mixer_spec import Mamba2Spec
from legato.model.recurrence import Convolution, RecurrentMixer, decays, in_float64, scan
from legato.model.spec import DecoderSpec
from legato.model.states import StepStates


class Mamba2(RecurrentMixer):
    """The mixer of Granite 4, Falcon-H1 and Nemotron-H.

    In shapes, H are its heads, and G their groups.
    """

    def __init__(
        self,
        own: Mamba2Spec,
        spec: DecoderSpec,
        state_layer: int,
        empty: MakeEmpty,
        communicator: Communicator,
    ) -> None:
        super().__init__(state_layer)
        self.num_heads, self.num_groups = own.num_heads, own.num_groups
        self.head_dim, self.state_size = own.head_dim, own.state_size
        self.limits = own.shortest_step, own.longest_step or math.inf
        self._sizes = [own.size, own.num_channels, own.num_heads]
        self._parts, self._scales = list(own.parts), own.scales
        self.in_proj = Linear(spec.hidden_size, sum(self._sizes), own.has_bias, empty)
        self.conv = Convolution(own.num_channels, own.kernel_size, own.has_conv_bias, empty)
        self.A_log = nn.Parameter(empty(own.num_heads).float(), requires_grad=False)
        self.D = nn.Parameter(empty(own.num_heads).float(), requires_grad=False)
        self.dt_bias = nn.Parameter(empty(own.num_heads).float(), requires_grad=False)
        self.norm: GroupNorm | SharedGroupNorm | None = None
        if own.has_shared_norm:
            self.norm = SharedGroupNorm(
                own.size, own.num_group_ranks, spec.norm_eps, empty, communicator
            )
        elif own.norm is not None:
            self.norm = GroupNorm(own.size, own.num_groups, spec.norm_eps, empty)
        self.has_shared_norm = own.has_shared_norm
        self.is_normed_first = own.norm == "before_gate"
        self.out_proj = Linear(own.size, spec.hidden_size, own.has_bias, empty)

    def project(self, hidden: torch.Tensor, states: StepStates) -> torch.Tensor:
        return self.scaled(super().project(hidden, states))

    def scaled(self, projected: torch.Tensor) -> torch.Tensor:
        """Multiply the parts of projected rows by their factors, in place."""
        for part, scale in zip(
            torch.split(projected, self._parts, dim=-1), self._scales, strict=True
        ):
            if scale != 1.0:
                part.mul_(scale)
        return projected

    def mixed(self, projected: torch.Tensor, states: StepStates) -> torch.Tensor:
        _, inputs, steps = torch.split(projected, self._sizes, dim=-1)
        mixed = F.silu(self.conv(inputs, states, self.layer))
        size = self.num_heads * self.head_dim
        x = mixed[:, :size].view(len(mixed), self.num_heads, self.head_dim)
        both = mixed[:, size:].view(len(mixed), 2, self.num_groups, -1)
        both = both.repeat_interleave(self.num_heads // self.num_groups, dim=2)  # [T, 2, H, N]
        dt = in_float64(F.softplus, steps.float() + self.dt_bias).clamp(*self.limits)  # [T, H]
        rows = dt[..., None] * x, both[:, 0], both[:, 1], -self.A_log.exp() * dt
        output = scan(rows, states, self.layer, token_form, chunk_form)
        return self.gated((output + self.D[:, None] * x).flatten(1), projected).to(projected.dtype)

    def gated(self, output: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        """Multiply outputs with their gates, and normalize them before or after it, or never.

        Args:
            output: float32 [T, H P], of the recurrence.
            projected: [T, ...], as in `mixed`.

        Returns:
            float32 [T, H P].
        """
        gate = F.silu(projected[:, : output.shape[1]].float())
        if self.norm is None:
            return output * gate
        normed: torch.Tensor
        normed = self.norm(output) * gate if self.is_normed_first else self.norm(output * gate)
        return normed


class GroupNorm(RMSNorm):
    """RMS normalization of each of G parts of a row."""

    def __init__(self, size: int, num_groups: int, eps: float, empty: MakeEmpty) -> None:
        super().__init__(size, eps, empty)
        self._num_groups = num_groups

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalize float32 [T, size]."""
        parts = rows.view(len(rows), self._num_groups, -1)
        return F.rms_norm(parts, parts.shape[-1:], None, self.eps).flatten(1) * self.weight


class SharedGroupNorm(RMSNorm):
    """RMS normalization of a group whose channels several ranks share.

    The squares of all groups are summed in one exchange of all ranks.

    Args:
        size: of this rank's channels, all of one group.
        num_ranks: adjacent ranks that share a group.
    """

    def __init__(
        self, size: int, num_ranks: int, eps: float, empty: MakeEmpty, communicator: Communicator
    ) -> None:
        super().__init__(size, eps, empty)
        self._num_ranks, self._communicator = num_ranks, communicator

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalize float32 [T, size]."""
        group = self._communicator.rank // self._num_ranks
        squares = rows.new_zeros(len(rows), self._communicator.size // self._num_ranks)
        squares[:, group] = rows.square().sum(-1)
        num_channels = self._num_ranks * rows.shape[1]
        means = self._communicator.sum(squares)[:, group, None] / num_channels
        return rows * torch.rsqrt(means + self.eps) * self.weight


def token_form(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, gate: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Advance R states by one token each, in place.

    Args:
        x: [R, H, P], multiplied with dt.
        b, c: [R, H, N].
        gate: [R, H], A dt.
        state: [R, H, P, N].

    Returns:
        [R, H, P], without what D adds.
    """
    states = state.view(-1, *state.shape[2:])
    states.mul_(gate.exp().view(-1, 1, 1))
    states.baddbmm_(x.reshape(len(states), -1, 1), b.reshape(len(states), 1, -1))
    return (state @ c[..., None]).squeeze(-1)


def chunk_form(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, gate: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Advance one state by several tokens, in place, with a few products of matrices.

    Args:
        x: [L, H, P], multiplied with dt.
        b, c: [L, H, N].
        gate: [L, H], A dt.
        state: [H, P, N].

    Returns:
        [L, H, P], without what D adds.
    """
    x, b, c = (rows.transpose(0, 1) for rows in (x, b, c))  # [H, L, ...]
    decay = decays(gate.t())  # [H, L, L]
    until = gate.t().cumsum(-1).exp()[..., None]
    output: torch.Tensor = (c @ b.mT * decay) @ x + until * (c @ state.mT)
    state.mul_(until[:, -1:]).add_((decay[:, -1, :, None] * x).mT @ b)
    return output.transpose(0, 1)
