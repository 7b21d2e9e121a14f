"""Layers shared by all architectures, on packed rows: no padding, no batch dimension.

Shapes use the legend of `legato.model.base`, and I for the MLP's intermediate size. Every
layer takes `empty`, which makes uninitialized weights of the model's dtype on its device: weights
come from a checkpoint, so initializing them would be wasted. Attribute names are those of
transformers' checkpoints.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import nn

from legato.model.base import StepAttention
from legato.model.communicator import ALONE, Communicator
from legato.model.rope import Turns, rotate
from legato.model.spec import DecoderSpec, MlpSpec

MakeEmpty = Callable[..., torch.Tensor]


class RMSNorm(nn.Module):
    """Root mean square layer normalization (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, empty: MakeEmpty) -> None:
        super().__init__()
        weight = empty(size)
        self.dtype = weight.dtype
        self.weight = nn.Parameter(weight.float(), requires_grad=False)
        self.eps = eps

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension, in float32; any dtype to the model's, same shape."""
        return F.rms_norm(rows.float(), self.weight.shape, self.weight, self.eps).to(self.dtype)


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


class Attention(nn.Module):
    """Grouped-query self-attention (Ainslie et al., 2023, arXiv:2305.13245) of one layer."""

    def __init__(self, spec: DecoderSpec, layer: int, empty: MakeEmpty) -> None:
        super().__init__()
        own = spec.layers[layer].attention
        self.layer = layer
        self.num_heads, self.num_kv_heads = own.num_heads, own.num_kv_heads
        self.head_dim = own.head_dim
        self.scale = own.scale
        self.sliding_window = own.window
        self.rope = own.rope
        self.qkv_proj = FusedLinear(
            spec.hidden_size,
            {"q_proj": own.query_size, "k_proj": own.kv_size, "v_proj": own.kv_size},
            own.qkv_bias,
            empty,
        )
        self.o_proj = Linear(own.query_size, spec.hidden_size, own.output_bias, empty)
        if own.qk_norm is not None:
            self.q_norm: RMSNorm | None = RMSNorm(own.head_dim, spec.norm_eps, empty)
            self.k_norm: RMSNorm | None = RMSNorm(own.head_dim, spec.norm_eps, empty)
        else:
            self.q_norm = self.k_norm = None

    def forward(
        self,
        hidden: torch.Tensor,
        ropes: Sequence[Turns],
        attention: StepAttention,
    ) -> torch.Tensor:
        """Map [T, E] to [T, E]; `ropes` has the step's turns by each of the decoder's ropes."""
        num_tokens, num_heads = hidden.shape[0], self.num_heads
        qkv = self.qkv_proj(hidden).view(num_tokens, -1, self.head_dim)  # [T, H + 2K, D]
        # Queries and keys are rotated together, which halves the number of small operations.
        qk, value = qkv.split((num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, :num_heads]), self.k_norm(qk[:, num_heads:])), dim=1)
        qk = rotate(qk, *ropes[self.rope])
        context = attention.attend(
            self.layer,
            qk[:, :num_heads],
            qk[:, num_heads:],
            value,
            scale=self.scale,
            sliding_window=self.sliding_window,
        )
        output: torch.Tensor = self.o_proj(context.reshape(num_tokens, -1))
        return output


class MLP(nn.Module):
    """Gated MLP with SiLU (SwiGLU; Shazeer, 2020, arXiv:2002.05202)."""

    def __init__(self, spec: MlpSpec, hidden_size: int, empty: MakeEmpty) -> None:
        super().__init__()
        self.gate_up_proj = FusedLinear(
            hidden_size, {"gate_proj": spec.size, "up_proj": spec.size}, spec.has_bias, empty
        )
        self.down_proj = Linear(spec.size, hidden_size, spec.has_bias, empty)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [T, E] to [T, E]."""
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)  # [T, I] each
        output: torch.Tensor = self.down_proj(F.silu(gate).mul_(up))
        return output


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm and with a residual connection.

    Args:
        spec: of this rank's part of the decoder.
        communicator: sums the ranks' parts.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        layer: int,
        empty: MakeEmpty,
        communicator: Communicator = ALONE,
    ) -> None:
        super().__init__()
        self._communicator = communicator
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, empty)
        self.self_attn = Attention(spec, layer, empty)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, empty)
        self.mlp = MLP(spec.layers[layer].mlp, spec.hidden_size, empty)

    def forward(
        self,
        hidden: torch.Tensor,
        ropes: Sequence[Turns],
        attention: StepAttention,
    ) -> torch.Tensor:
        """Add this layer's output to `hidden` [T, E] float32, in place."""
        attended = self.self_attn(self.input_layernorm(hidden), ropes, attention)
        hidden += self._communicator.sum(attended)
        hidden += self._communicator.sum(self.mlp(self.post_attention_layernorm(hidden)))
        return hidden
