"""Gated delta net: linear attention whose state forgets, and corrects what it holds for a key.

Yang et al., 2024, arXiv:2412.06464. A head's state S [K, V] maps keys to values. For each token,
with keys and queries of length 1, a gate g <= 0 and a rate beta in (0, 1):

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q

Everything is in float32: a state that is rounded to bfloat16 at every token errs by up to 2e-2.
"""

import torch
import torch.nn.functional as F
from torch import nn

from legato.model.linear import FusedLinear, Linear, MakeEmpty, RMSNorm
from legato.model.mixer_spec import DeltaNetSpec
from legato.model.recurrence import Convolution, RecurrentMixer, decays, in_float64, scan
from legato.model.spec import DecoderSpec
from legato.model.states import StepStates

_SMALLEST_SQUARE = 1e-6
"""Added to the square of a query's or a key's length."""


class DeltaNet(RecurrentMixer):
    """The mixer of Qwen3-Next and Qwen3.5.

    In shapes, H are the heads of values; heads of queries and keys serve several of them each.
    """

    def __init__(
        self, own: DeltaNetSpec, spec: DecoderSpec, state_layer: int, empty: MakeEmpty
    ) -> None:
        super().__init__(state_layer)
        self.num_key_heads, self.num_heads = own.num_key_heads, own.num_heads
        self.key_dim, self.value_dim = own.key_dim, own.value_dim
        self._sizes = [own.num_channels, own.value_size, own.num_heads, own.num_heads]
        self.in_proj = FusedLinear(spec.hidden_size, own.projections, False, empty)
        self.conv = Convolution(own.num_channels, own.kernel_size, False, empty)
        self.A_log = nn.Parameter(empty(own.num_heads).float(), requires_grad=False)
        self.dt_bias = nn.Parameter(empty(own.num_heads).float(), requires_grad=False)
        self.norm = RMSNorm(own.value_dim, spec.norm_eps, empty)
        self.out_proj = Linear(own.value_size, spec.hidden_size, False, empty)

    def mixed(self, projected: torch.Tensor, states: StepStates) -> torch.Tensor:
        inputs, z, b, a = torch.split(projected, self._sizes, dim=-1)
        query, key, value = self._convolved(inputs, states)
        gate = -self.A_log.exp() * in_float64(F.softplus, a.float() + self.dt_bias)  # [T, H]
        beta = in_float64(torch.sigmoid, b)
        rows = value, query, key, gate, beta
        output = scan(rows, states, self.layer, token_form, chunk_form)
        normed = self.norm(output).float()
        gated = normed * F.silu(z.float().view(normed.shape))
        result: torch.Tensor = gated.flatten(1).to(projected.dtype)
        return result

    def _convolved(
        self, inputs: torch.Tensor, states: StepStates
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries and keys [T, H, K] of length 1, queries scaled, and values [T, H, V]."""
        mixed = F.silu(self.conv(inputs, states, self.layer))
        num_keys = 2 * self.num_key_heads * self.key_dim
        qk = mixed[:, :num_keys].view(len(mixed), 2, self.num_key_heads, self.key_dim)
        qk = qk * torch.rsqrt(qk.square().sum(-1, keepdim=True) + _SMALLEST_SQUARE)
        qk = qk.repeat_interleave(self.num_heads // self.num_key_heads, dim=2)
        value = mixed[:, num_keys:].view(len(mixed), self.num_heads, self.value_dim)
        return qk[:, 0] * self.key_dim**-0.5, qk[:, 1], value


def token_form(
    value: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Advance N states by one token each, in place.

    Args:
        value: [N, H, V].
        query, key: [N, H, K].
        gate, beta: [N, H].
        state: [N, H, K, V].

    Returns:
        [N, H, V].
    """
    decay = gate.exp()[..., None]  # [N, H, 1]
    # A decode's time is that of reading and writing states, so keys and queries read them together:
    # what the correction adds to an output follows from key and query alone.
    held, output = (decay[..., None] * (torch.stack((key, query), 2) @ state)).unbind(2)
    correction = beta[..., None] * (value - held)
    states = state.view(-1, *state.shape[2:])
    states.mul_(decay.view(-1, 1, 1))
    states.baddbmm_(key.reshape(len(states), -1, 1), correction.view(len(states), 1, -1))
    return output + (key * query).sum(-1, keepdim=True) * correction


def chunk_form(
    value: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Advance one state by C tokens, in place, with a few products of matrices.

    With G the sums of gates and D their `decays`, the corrections U of all tokens solve
    (I + tril(beta_i k_i . k_j D_ij, -1)) U = beta (V - exp(G) K S).

    Args:
        value: [C, H, V].
        query, key: [C, H, K].
        gate, beta: [C, H].
        state: [H, K, V].

    Returns:
        [C, H, V].
    """
    value, query, key = (rows.transpose(0, 1) for rows in (value, query, key))  # [H, C, ...]
    decay = decays(gate.t())  # [H, C, C]
    rate = beta.t()[..., None]  # [H, C, 1]
    until = gate.t().cumsum(-1).exp()[..., None]
    system: torch.Tensor = rate * (key @ key.mT) * decay  # only what is below its diagonal is read
    wanted = rate * (value - until * (key @ state))
    corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    output: torch.Tensor = (until * query) @ state + (query @ key.mT * decay) @ corrections
    state.mul_(until[:, -1:]).add_((decay[:, -1, :, None] * key).mT @ corrections)
    return output.transpose(0, 1)
