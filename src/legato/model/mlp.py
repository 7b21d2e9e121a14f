"""Feed-forward networks without experts, and their activations.

Shapes use the legend of `legato.model.model`, and I for the intermediate size.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from legato.model.linear import FusedLinear, Linear, MakeEmpty, scaled
from legato.model.mlp_spec import Activation, MlpSpec


class XIELU(nn.Module):
    """An activation with learned slopes (Huang and Schlag, 2024, arXiv:2411.13010)."""

    def __init__(self, empty: MakeEmpty) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(empty(1), requires_grad=False)
        self.alpha_n = nn.Parameter(empty(1), requires_grad=False)
        self.beta = nn.Parameter(empty(()), requires_grad=False)
        self.eps = nn.Parameter(empty(()), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map each number of `rows`, of any shape."""
        below = self.beta + F.softplus(self.alpha_n)
        return self.beta * rows + torch.where(
            rows > 0,
            F.softplus(self.alpha_p) * rows * rows,
            below * (torch.expm1(torch.minimum(rows, self.eps)) - rows),
        )


_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda rows: F.relu(rows).square(),
}


def make_activation(name: Activation, empty: MakeEmpty) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function of numbers of any shape; xIELU has weights."""
    return XIELU(empty) if name == "xielu" else _ACTIVATIONS[name]


class MLP(nn.Module):
    """Gated MLP (GLU variants; Shazeer, 2020, arXiv:2002.05202)."""

    def __init__(self, spec: MlpSpec, hidden_size: int, empty: MakeEmpty) -> None:
        super().__init__()
        self.activation, self.gate_scale = spec.activation, spec.gate_scale
        self.gate_up_proj = FusedLinear(
            hidden_size, {"gate_proj": spec.size, "up_proj": spec.size}, spec.has_bias, empty
        )
        self.act_fn = make_activation(spec.activation, empty)
        self.down_proj = Linear(spec.size, hidden_size, spec.has_bias, empty)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [T, E] to [T, E]."""
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)  # [T, I] each
        inner = self.act_fn(scaled(gate, self.gate_scale)).mul_(up)
        output: torch.Tensor = self.down_proj(inner)
        return output


class UngatedMLP(nn.Module):
    """Two projections with an activation between them."""

    def __init__(self, spec: MlpSpec, hidden_size: int, empty: MakeEmpty) -> None:
        super().__init__()
        self.up_proj = Linear(hidden_size, spec.size, spec.has_bias, empty)
        self.act_fn = make_activation(spec.activation, empty)
        self.down_proj = Linear(spec.size, hidden_size, spec.has_bias, empty)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [T, E] to [T, E]."""
        output: torch.Tensor = self.down_proj(self.act_fn(self.up_proj(hidden)))
        return output


def make_dense_mlp(spec: MlpSpec, hidden_size: int, empty: MakeEmpty) -> MLP | UngatedMLP:
    """Make a feed-forward network without experts, from [T, E] to [T, E]."""
    return (MLP if spec.is_gated else UngatedMLP)(spec, hidden_size, empty)
