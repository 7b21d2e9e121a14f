"""Layers shared by all architectures, on packed rows: no padding, no batch dimension.

Shapes use the legend of `legato.model.base`, and I for the MLP's intermediate size. Every
layer takes `empty`, which makes uninitialized weights of the model's dtype on its device: weights
come from a checkpoint, so initializing them would be wasted. Attribute names are those of
transformers' checkpoints.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import nn

from legato.model.base import StepAttention
from legato.model.communicator import ALONE, Communicator
from legato.model.mlp_spec import Activation, MlpSpec, MoeSpec
from legato.model.rope import Turns, rotate
from legato.model.spec import DecoderSpec
from legato.model.states import StepStates

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


class Attention(nn.Module):
    """Grouped-query self-attention (Ainslie et al., 2023, arXiv:2305.13245) of one layer."""

    def __init__(self, spec: DecoderSpec, layer: int, empty: MakeEmpty) -> None:
        super().__init__()
        own = spec.layers[layer].attention
        assert own is not None
        self.layer = spec.cache_layer(layer)
        self.num_heads, self.num_kv_heads = own.num_heads, own.num_kv_heads
        self.head_dim = own.head_dim
        self.scale = own.scale
        self.sliding_window = own.window
        self.rope = own.rope
        sizes = {
            "q_proj": own.query_size,
            "k_proj": own.key_size,
            "v_proj": own.value_size,
            "gate_proj": own.query_size if own.has_gate else 0,
        }
        sizes = {name: size for name, size in sizes.items() if size}
        self.has_gate = own.has_gate
        self.has_own_kv = own.kv_from is None
        self.value_is_key = own.value_is_key
        self.value_eps = spec.norm_eps if own.has_value_norm else None
        self.qkv_proj = FusedLinear(spec.hidden_size, sizes, own.qkv_bias, empty)
        self.o_proj = Linear(own.query_size, spec.hidden_size, own.output_bias, empty)
        self.softcap = own.softcap
        self.sinks: nn.Parameter | None = None
        if own.has_sinks:
            self.sinks = nn.Parameter(empty(own.num_heads).float(), requires_grad=False)
        self.norm_after_rope = own.norm_after_rope
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if own.qk_norm is not None:
            is_whole = own.qk_norm == "whole"
            self.q_norm = RMSNorm(
                own.query_size if is_whole else own.head_dim, spec.norm_eps, empty
            )
            if self.has_own_kv:
                size = own.kv_size if is_whole else own.head_dim
                self.k_norm = RMSNorm(size, spec.norm_eps, empty)

    def forward(
        self,
        hidden: torch.Tensor,
        ropes: Sequence[Turns],
        attention: StepAttention,
    ) -> torch.Tensor:
        """Map [T, E] to [T, E]; `ropes` has the step's turns by each of the decoder's ropes."""
        num_tokens, num_heads = hidden.shape[0], self.num_heads
        turns = ropes[self.rope]
        rows = self.qkv_proj(hidden).view(num_tokens, -1, self.head_dim)  # [T, H + 2K, D]
        # Queries and keys are rotated together, which halves the number of small operations.
        num_rotated = num_heads + (self.num_kv_heads if self.has_own_kv else 0)
        qk = rows[:, :num_rotated]
        if not self.norm_after_rope:
            qk = self._normed(qk)
        qk = rotate(qk, turns.cos, turns.sin)
        if self.norm_after_rope:
            qk = self._normed(qk)
        query = qk[:, :num_heads]
        context = attention.attend(
            self.layer,
            query if turns.query_scale is None else query * turns.query_scale,
            qk[:, num_heads:] if self.has_own_kv else None,
            self._values(rows) if self.has_own_kv else None,
            scale=self.scale,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
            sinks=self.sinks,
        )
        if self.has_gate:
            context = context * rows[:, -num_heads:].sigmoid()
        output: torch.Tensor = self.o_proj(context.reshape(num_tokens, -1))
        return output

    def _values(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the values [T, K, D] of projected rows; the keys' rows if values are keys."""
        first = self.num_heads + (0 if self.value_is_key else self.num_kv_heads)
        values = rows[:, first : first + self.num_kv_heads]
        if self.value_eps is None:
            return values
        return F.rms_norm(values.float(), values.shape[-1:], eps=self.value_eps).to(values.dtype)

    def _normed(self, qk: torch.Tensor) -> torch.Tensor:
        """Normalize queries and keys, [T, H + K, D], if the model does."""
        parts = []
        for norm, heads in (
            (self.q_norm, qk[:, : self.num_heads]),
            (self.k_norm, qk[:, self.num_heads :]),
        ):
            if norm is None:
                continue
            rows = heads.reshape(len(heads), -1, len(norm.weight))
            parts.append(norm(rows).view(heads.shape))
        return torch.cat(parts, dim=1) if parts else qk


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


def make_mlp(spec: MlpSpec | MoeSpec, hidden_size: int, empty: MakeEmpty) -> nn.Module:
    """Make a feed-forward network from [T, E] to [T, E]."""
    from legato.model.experts import MixtureOfExperts  # it imports this module

    if isinstance(spec, MoeSpec):
        return MixtureOfExperts(spec, hidden_size, empty)
    return (MLP if spec.is_gated else UngatedMLP)(spec, hidden_size, empty)


class LayerInput(nn.Module):
    """A projection of a layer's own embedding of each token, gated by the residual stream."""

    def __init__(
        self, size: int, activation: Activation, spec: DecoderSpec, empty: MakeEmpty
    ) -> None:
        super().__init__()
        self.gate = Linear(spec.hidden_size, size, False, empty)
        self.act_fn = make_activation(activation, empty)
        self.projection = Linear(size, spec.hidden_size, False, empty)
        self.norm = make_norm(spec, empty)

    def forward(self, hidden: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Map the residual stream [T, E] and the layer's embeddings [T, P] to [T, E]."""
        gates = self.act_fn(self.gate(hidden.to(inputs.dtype)))
        output: torch.Tensor = self.norm(self.projection(gates * inputs))
        return output


def _make_attention(spec: DecoderSpec, layer: int, empty: MakeEmpty) -> nn.Module | None:
    from legato.model.latent_attention import LatentAttention  # it imports this module

    own = spec.layers[layer].attention
    if own is None:
        return None
    return (Attention if own.latent is None else LatentAttention)(spec, layer, empty)


class DecoderLayer(nn.Module):
    """Mixer and MLP with a residual connection, or one of them, and the norms of the layer's order.

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
        own = spec.layers[layer]
        self._communicator = communicator
        self._is_parallel = own.is_parallel
        self._residual_scale = own.residual_scale
        self._attention_scale, self._recurrence_scale, self._mlp_scale = own.output_scales
        self._dtype = empty(0).dtype
        has_first = own.has_norms_before and own.has_mixer
        self.input_layernorm = make_norm(spec, empty) if has_first else None
        self.self_attn = _make_attention(spec, layer, empty)
        self.recurrence: nn.Module | None = None
        if own.recurrence is not None:
            from legato.model.recurrence import make_recurrence  # it imports this module

            self.recurrence = make_recurrence(spec, layer, empty, communicator)
        has_second = own.has_norms_before and own.order != "parallel" and own.mlp is not None
        self.post_attention_layernorm = make_norm(spec, empty) if has_second else None
        self.mlp = None if own.mlp is None else make_mlp(own.mlp, spec.hidden_size, empty)
        self.attention_output_layernorm = make_norm(spec, empty) if own.has_norms_after else None
        self.mlp_output_layernorm = make_norm(spec, empty) if own.has_norms_after else None
        self.mixture: nn.Module | None = None
        if own.mixture is not None:
            from legato.model.experts import MixtureBesideMlp  # it imports this module

            self.mixture = MixtureBesideMlp(own.mixture, spec, empty, communicator)
        self.layer_input: LayerInput | None = None
        if spec.layer_inputs is not None:
            assert own.mlp is not None, "a gate has the activation of its layer's MLP"
            size, activation = spec.layer_inputs.size, own.mlp.activation
            self.layer_input = LayerInput(size, activation, spec, empty)
        self.layer_scalar: nn.Parameter | None = None
        if own.has_output_scale:
            self.layer_scalar = nn.Parameter(empty(1).float(), requires_grad=False)

    def forward(
        self,
        hidden: torch.Tensor,
        ropes: Sequence[Turns],
        attention: StepAttention,
        states: StepStates | None,
        inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add this layer's output to `hidden` [T, E] float32, in place.

        Args:
            inputs: the layer's embeddings of the tokens [T, P]; None if it has none.
        """
        mixed: torch.Tensor | None = None
        if self.self_attn is not None or self.recurrence is not None:
            rows = self._rows(self.input_layernorm, hidden)
            mixed = self._communicator.sum(self._mixed(rows, ropes, attention, states))
            if not self._is_parallel:
                self._add(hidden, mixed, self.attention_output_layernorm)
        if self.mlp is not None:
            if not self._is_parallel or self.post_attention_layernorm is not None:
                rows = self._rows(self.post_attention_layernorm, hidden)
            output = self._communicator.sum(scaled(self.mlp(rows), self._mlp_scale))
            if self.mixture is not None:
                output = self.mixture(hidden, output)
            if self._is_parallel and mixed is not None:
                self._add(hidden, mixed, None)
            self._add(hidden, output, self.mlp_output_layernorm)
        if self.layer_input is not None:
            assert inputs is not None, "the layer needs embeddings of its own"
            hidden.add_(self.layer_input(hidden, inputs))
        if self.layer_scalar is not None:
            hidden.mul_(self.layer_scalar)
        return hidden

    def _mixed(
        self,
        rows: torch.Tensor,
        ropes: Sequence[Turns],
        attention: StepAttention,
        states: StepStates | None,
    ) -> torch.Tensor:
        """Return the mixer's output for rows [T, E]."""
        outputs: list[torch.Tensor] = []
        if self.self_attn is not None:
            own = self.self_attn(rows, ropes, attention)
            outputs.append(scaled(own, self._attention_scale))
        if self.recurrence is not None:
            assert states is not None, "recurrent layers need states"
            outputs.append(scaled(self.recurrence(rows, states), self._recurrence_scale))
        return outputs[0] if len(outputs) == 1 else outputs[0] + outputs[1]

    def _rows(self, norm: nn.Module | None, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a network reads, in the model's dtype."""
        return hidden.to(self._dtype) if norm is None else norm(hidden)

    def _add(self, hidden: torch.Tensor, output: torch.Tensor, norm: nn.Module | None) -> None:
        hidden.add_(output if norm is None else norm(output), alpha=self._residual_scale)


def scaled(rows: torch.Tensor, scale: float) -> torch.Tensor:
    """Return rows of any shape times a scale, as they are if it is 1."""
    return rows if scale == 1.0 else rows * scale
