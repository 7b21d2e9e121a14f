"""A decoder's layer: its mixer, its feed-forward network, and the norms of their order.

Shapes use the legend of `legato.model.model`.
"""

from collections.abc import Sequence

import torch
from torch import nn

from legato.model.attention_layer import Attention
from legato.model.communicator import ALONE, Communicator
from legato.model.delta_net import DeltaNet
from legato.model.experts import MixtureBesideMlp, MixtureOfExperts
from legato.model.latent_attention import LatentAttention
from legato.model.linear import Linear, MakeEmpty, make_norm, scaled
from legato.model.mamba2 import Mamba2
from legato.model.mixer_spec import DeltaNetSpec, Mamba2Spec, ShortConvSpec
from legato.model.mlp import make_activation, make_dense_mlp
from legato.model.mlp_spec import Activation, MlpSpec, MoeSpec
from legato.model.model import StepAttention
from legato.model.recurrence import RecurrentMixer, ShortConv
from legato.model.rope import RotaryTurns
from legato.model.spec import DecoderSpec
from legato.model.states import StepStates


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
            self.recurrence = make_recurrence(spec, layer, empty, communicator)
        has_second = own.has_norms_before and own.order != "parallel" and own.mlp is not None
        self.post_attention_layernorm = make_norm(spec, empty) if has_second else None
        self.mlp = None if own.mlp is None else make_mlp(own.mlp, spec.hidden_size, empty)
        self.attention_output_layernorm = make_norm(spec, empty) if own.has_norms_after else None
        self.mlp_output_layernorm = make_norm(spec, empty) if own.has_norms_after else None
        self.mixture: nn.Module | None = None
        if own.mixture is not None:
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
        ropes: Sequence[RotaryTurns],
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
        ropes: Sequence[RotaryTurns],
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


def make_mlp(spec: MlpSpec | MoeSpec, hidden_size: int, empty: MakeEmpty) -> nn.Module:
    """Make a feed-forward network from [T, E] to [T, E]."""
    if isinstance(spec, MoeSpec):
        return MixtureOfExperts(spec, hidden_size, empty)
    return make_dense_mlp(spec, hidden_size, empty)


def _make_attention(spec: DecoderSpec, layer: int, empty: MakeEmpty) -> nn.Module | None:
    own = spec.layers[layer].attention
    if own is None:
        return None
    return (Attention if own.latent is None else LatentAttention)(spec, layer, empty)


def make_recurrence(
    spec: DecoderSpec, layer: int, empty: MakeEmpty, communicator: Communicator = ALONE
) -> RecurrentMixer:
    """Make the recurrent mixer of a layer that has one.

    Args:
        spec: of this rank's part of the decoder.
        communicator: to the other ranks.
    """
    state_layer = spec.state_layer(layer)
    match spec.layers[layer].recurrence:
        case ShortConvSpec() as own:
            return ShortConv(own, spec.hidden_size, state_layer, empty)
        case DeltaNetSpec() as own:
            return DeltaNet(own, spec, state_layer, empty)
        case Mamba2Spec() as own:
            return Mamba2(own, spec, state_layer, empty, communicator)
        case None:
            raise AssertionError("the layer has no recurrent mixer")
