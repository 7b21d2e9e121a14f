"""Projections and norms on packed rows: no padding, no batch dimension.

Every layer takes `empty`, which makes uninitialized weights of the model's dtype on its device:
weights come from a checkpoint, so initializing them would be wasted. Attribute names are those of
transformers' checkpoints.
"""

from collections.abc import Callable, Mapping
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import nn

from legato.model.spec import DecoderSpec

MakeEmpty = Callable[..., torch.Tensor]


class RMSNorm(nn.Module):
    """Root mean square layer normalization (Zhang and Sennrich, 2019, arXiv:1910.07467).

    Args:
        is_plain: checkpoints have no weights of it: all are 1.
    """

    weight: torch.Tensor

    def __init__(self, size: int, eps: float, empty: MakeEmpty, *, is_plain: bool = False) -> None:
        super().__init__()
        weight = empty(size)
        self.dtype = weight.dtype
        if is_plain:
            self.register_buffer("weight", torch.ones_like(weight).float(), persistent=False)
        else:
            self.weight = nn.Parameter(weight.float(), requires_grad=False)
        self.eps = eps

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension, in float32; any dtype to the model's, same shape."""
        return F.rms_norm(rows.float(), self.weight.shape, self.weight, self.eps).to(self.dtype)


class LayerNorm(nn.Module):
    """Layer normalization, with or without a bias (Ba et al., 2016, arXiv:1607.06450)."""

    def __init__(self, size: int, eps: float, has_bias: bool, empty: MakeEmpty) -> None:
        super().__init__()
        weight = empty(size)
        self.dtype = weight.dtype
        self.weight = nn.Parameter(weight.float(), requires_grad=False)
        self.bias = nn.Parameter(empty(size).float(), requires_grad=False) if has_bias else None
        self.eps = eps

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension, in float32; any dtype to the model's, same shape."""
        normed = F.layer_norm(rows.float(), self.weight.shape, self.weight, self.bias, self.eps)
        return normed.to(self.dtype)


def make_norm(spec: DecoderSpec, empty: MakeEmpty) -> RMSNorm | LayerNorm:
    """Make a norm of the decoder's kind, for its hidden states."""
    if spec.norm == "layer":
        return LayerNorm(spec.hidden_size, spec.norm_eps, spec.norm_bias, empty)
    return RMSNorm(spec.hidden_size, spec.norm_eps, empty)


class Linear(nn.Module):
    """A projection; `PackedLinear` is its prepacked form."""

    def __init__(self, in_size: int, out_size: int, bias: bool, empty: MakeEmpty) -> None:
        super().__init__()
        self.weight = nn.Parameter(empty(out_size, in_size), requires_grad=False)
        self.bias = nn.Parameter(empty(out_size), requires_grad=False) if bias else None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [T, in] to [T, out]."""
        return F.linear(rows, self.weight, self.bias)


class FusedLinear(Linear):
    """Several projections of the same rows, computed as one.

    Attributes:
        parts: key a projection's name in checkpoints, value its outputs [start, end).
    """

    def __init__(
        self, in_size: int, out_sizes: Mapping[str, int], bias: bool, empty: MakeEmpty
    ) -> None:
        super().__init__(in_size, sum(out_sizes.values()), bias, empty)
        ends = accumulate(out_sizes.values())
        self.parts = {
            name: (end - size, end)
            for (name, size), end in zip(out_sizes.items(), ends, strict=True)
        }


def scaled(rows: torch.Tensor, scale: float) -> torch.Tensor:
    """Return rows of any shape times a scale, as they are if it is 1."""
    return rows if scale == 1.0 else rows * scale
