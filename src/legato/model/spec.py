"""What distinguishes one decoder from another, as records of numbers and switches; no code.

A decoder is a list of layers. A layer is a mixer of tokens (attention, or a recurrence) and a
feed-forward network with norms around them. Layers of one decoder may differ in any of their
numbers.
"""

import math
from typing import Annotated, Literal

import msgspec
import torch

from legato.core.errors import ConfigError, UnsupportedModelError
from legato.core.rows import ExpertCounts
from legato.core.validation import check_fields
from legato.model.base import CacheSpec
from legato.model.rope import RopeFrequencies
from legato.model.states import StateShape

_MODEL_LEN_LIMIT = 2**31

Size = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_Eps = Annotated[float, msgspec.Meta(ge=1e-12, le=0.1)]
_Scale = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1024)]


Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "xielu"]
NormOrder = Literal["pre", "post", "sandwich", "parallel", "parallel_two"]


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Grouped-query attention.

    Attributes:
        scale: factor on the query-key products.
        rope: which of the decoder's ropes turns queries and keys.
        window: keys visible to a query; None if all are.
        qk_norm: queries and keys are RMS-normalized, each head or all heads as one row; None if
            they are not.
        norm_after_rope: they are normalized after rope rather than before.
        softcap: largest scaled query-key product c; it becomes c * tanh(product / c).
        has_sinks: the softmax of each query head has one more score, which is learned and has no
            value (Xiao et al., 2024, arXiv:2309.17453).
        qkv_bias: the query, key and value projections have biases.
        output_bias: the output projection has a bias.
        has_gate: the output of each head is multiplied by the sigmoid of a further projection.

    Raises:
        UnsupportedModelError: query heads do not divide evenly among key/value heads.
    """

    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    scale: _Scale
    rope: Annotated[int, msgspec.Meta(ge=0)] = 0
    window: Size | None = None
    qk_norm: Literal["head", "whole"] | None = None
    norm_after_rope: bool = False
    softcap: _Scale | None = None
    has_sinks: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    has_gate: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads"
            )

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


class ShortConvSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A gated convolution over the last few positions: `c * conv(b * x)`.

    Attributes:
        kernel_size: positions that a convolution reads, its own included.
        has_bias: the convolution and the projections have biases.
    """

    kernel_size: Annotated[int, msgspec.Meta(ge=2, le=64)]
    has_bias: bool = False

    def state(self, hidden_size: int) -> StateShape:
        """Return the shape of a request's state."""
        return StateShape(num_inputs=self.kernel_size - 1, num_channels=hidden_size)

    def num_weights(self, hidden_size: int) -> int:
        """Return the size of the projections."""
        return 4 * hidden_size * hidden_size


class DeltaNetSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Gated delta net.

    Attributes:
        num_heads: of values, and of the state.
        num_key_heads: of queries and of keys.
        key_dim, value_dim: sizes of a head's key and value.
        kernel_size: positions that the convolution of queries, keys and values reads.

    Raises:
        UnsupportedModelError: the heads do not divide evenly among those of keys.
    """

    num_heads: Size
    num_key_heads: Size
    key_dim: Size
    value_dim: Size
    kernel_size: Annotated[int, msgspec.Meta(ge=2, le=64)] = 4

    def __post_init__(self) -> None:
        if self.num_heads % self.num_key_heads:
            raise UnsupportedModelError(
                f"{self.num_heads} value heads cannot share {self.num_key_heads} key heads"
            )

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    def state(self, hidden_size: int) -> StateShape:  # noqa: ARG002
        """Return the shape of a request's state."""
        return StateShape(
            num_inputs=self.kernel_size - 1,
            num_channels=self.num_channels,
            recurrent=(self.num_heads, self.key_dim, self.value_dim),
        )

    def num_weights(self, hidden_size: int) -> int:
        """Return the size of the projections."""
        return hidden_size * (self.num_channels + 2 * self.value_size + 2 * self.num_heads)


class Mamba2Spec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Mamba-2.

    Attributes:
        num_groups: of heads; the heads of one share their vectors B and C.
        head_dim: size of a head's input and output.
        state_size: numbers of the state for each of them.
        kernel_size: positions that the convolution of inputs, B and C reads.
        has_conv_bias, has_bias: the convolution, or the projections, have biases.
        shortest_step, longest_step: limits of dt; None for none.
        norm: of the outputs, after they are multiplied with their gates or before; None for none.
        scales: factors on the projected gates, inputs, B, C and steps.

    Raises:
        UnsupportedModelError: the heads do not divide evenly among the groups.
    """

    num_heads: Size
    num_groups: Size
    head_dim: Size
    state_size: Size
    kernel_size: Annotated[int, msgspec.Meta(ge=2, le=64)] = 4
    has_conv_bias: bool = True
    has_bias: bool = False
    shortest_step: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    longest_step: _Scale | None = None
    norm: Literal["after_gate", "before_gate"] | None = "after_gate"
    scales: tuple[_Scale, _Scale, _Scale, _Scale, _Scale] = (1.0,) * 5

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise UnsupportedModelError(
                f"{self.num_heads} heads cannot be divided into {self.num_groups} groups"
            )

    @property
    def size(self) -> int:
        """Size of all heads' inputs."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: inputs, B and C."""
        return self.size + 2 * self.num_groups * self.state_size

    @property
    def parts(self) -> tuple[int, int, int, int, int]:
        """Sizes of the projected gates, inputs, B, C and steps."""
        size, shared = self.size, self.num_groups * self.state_size
        return size, size, shared, shared, self.num_heads

    def state(self, hidden_size: int) -> StateShape:  # noqa: ARG002
        """Return the shape of a request's state."""
        return StateShape(
            num_inputs=self.kernel_size - 1,
            num_channels=self.num_channels,
            recurrent=(self.num_heads, self.head_dim, self.state_size),
        )

    def num_weights(self, hidden_size: int) -> int:
        """Return the size of the projections."""
        return hidden_size * (2 * self.size + self.num_channels + self.num_heads)


RecurrenceSpec = ShortConvSpec | DeltaNetSpec | Mamba2Spec


class MlpSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A feed-forward network, gated (`act(gate) * up`) or not (`act(up)`).

    Attributes:
        size: width of its activations.
        has_bias: its projections have biases.
        gate_scale: factor on the gate, before the activation.
    """

    size: Size
    activation: Activation = "silu"
    is_gated: bool = True
    has_bias: bool = False
    gate_scale: _Scale = 1.0


class MoeSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A mixture of experts: a router picks a few MLPs for each row (arXiv:1701.06538).

    Attributes:
        num_active: experts that compute a row.
        size: width of an expert's activations.
        is_gated: the experts, and the MLP for all rows, are `act(gate) * up` rather than `act(up)`.
        gate_limit: limit of gates from above, and of the other projection from both sides; the
            product is then `(up + 1) * gate * sigmoid(gate_slope * gate)`, as in gpt-oss. None for
            `act(gate) * up`.
        has_bias: the experts' projections have biases.
        score: of an expert, from the router's logits: a softmax, a softmax of the picked ones
            alone, or a sigmoid.
        has_router_bias: the logits have biases.
        has_selection_bias: scores have biases while experts are picked.
        num_groups, num_active_groups: groups of adjacent experts, and groups with picked experts;
            those with the largest sum of their best two scores.
        is_normalized: the weights of a row's experts are scores divided by their sum.
        factor: on the weights.
        shared_size: width of an MLP that computes all rows; None if there is none.
        has_shared_gate: its output is multiplied by a gate, one number a row.
        latent_size: size of the rows that experts map, between two projections that they share;
            None if they map the hidden states themselves.

    Raises:
        UnsupportedModelError: more experts are picked than there are, or groups are uneven.
    """

    num_experts: _Count
    num_active: _Count
    size: Size
    activation: Activation = "silu"
    is_gated: bool = True
    gate_limit: _Scale | None = None
    gate_slope: _Scale = 1.0
    has_bias: bool = False
    score: Literal["softmax", "softmax_of_active", "sigmoid"] = "softmax"
    has_router_bias: bool = False
    has_selection_bias: bool = False
    num_groups: _Count = 1
    num_active_groups: _Count = 1
    is_normalized: bool = True
    factor: _Scale = 1.0
    shared_size: Size | None = None
    has_shared_gate: bool = False
    latent_size: Size | None = None

    def __post_init__(self) -> None:
        if self.num_experts % self.num_groups:
            raise UnsupportedModelError(
                f"{self.num_experts} experts cannot be divided into {self.num_groups} groups"
            )
        group = self.num_experts // self.num_groups
        if not 0 < self.num_active <= group * self.num_active_groups <= self.num_experts:
            raise UnsupportedModelError(
                f"{self.num_active} experts of {self.num_active_groups} groups cannot be picked "
                f"from {self.num_groups} groups of {group}"
            )
        if self.num_groups > 1 and group < 2:
            raise UnsupportedModelError("groups of one expert are not supported")

    @property
    def shared(self) -> MlpSpec | None:
        """The MLP that computes all rows."""
        if self.shared_size is None:
            return None
        return MlpSpec(size=self.shared_size, activation=self.activation, is_gated=self.is_gated)


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One layer: a mixer and a feed-forward network, each added to the residual stream.

    Attributes:
        attention, recurrence: the mixer: either of them, or the sum of both; None of both if the
            layer is a feed-forward network alone.
        mlp: the feed-forward network; None if the layer is a mixer alone.
        order: where the norms are: before each network (pre), after each (post), or both
            (sandwich). In parallel layers, both networks read the same rows: after one norm, or
            each after its own.
        residual_scale: factor on what is added.
        output_scales: further factors on the outputs of attention, recurrence and MLP.

    Raises:
        UnsupportedModelError: the layer is empty, or has one network in another order than pre.
    """

    attention: AttentionSpec | None
    mlp: MlpSpec | MoeSpec | None
    recurrence: RecurrenceSpec | None = None
    order: NormOrder = "pre"
    residual_scale: _Scale = 1.0
    output_scales: tuple[_Scale, _Scale, _Scale] = (1.0,) * 3

    def __post_init__(self) -> None:
        if not self.has_mixer and self.mlp is None:
            raise UnsupportedModelError("layers without any network are not supported")
        if self.order != "pre" and not (self.has_mixer and self.mlp is not None):
            raise UnsupportedModelError(
                f"layers of one network in the order {self.order} are not supported"
            )

    @property
    def has_mixer(self) -> bool:
        return self.attention is not None or self.recurrence is not None

    @property
    def has_norms_before(self) -> bool:
        return self.order != "post"

    @property
    def has_norms_after(self) -> bool:
        return self.order in ("post", "sandwich")


class DecoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer.

    The annotations of all records are the values that models have; `check` compares them.

    Attributes:
        ropes: used by some of the layers each.
        norm: kind of the layers' norms and of the last one. Norms of queries and keys are RMS
            norms.
        norm_bias: those norms have biases.
        norm_eps: added to the mean square in every norm.
        embedding_scale: factor on the embeddings.
        logit_scale: factor on the logits.
        logit_softcap: largest logit c; a logit becomes c * tanh(logit / c).
        max_model_len: positions that the model was made for (prompt plus output, in tokens).
        tie_word_embeddings: the output projection is the embedding matrix.

    Raises:
        UnsupportedModelError: there are no layers, layers have different heads, or the number of
            positions is out of range.
    """

    vocab_size: Size
    hidden_size: Size
    max_model_len: int
    norm_eps: _Eps
    ropes: tuple[RopeFrequencies, ...]
    layers: tuple[LayerSpec, ...]
    tie_word_embeddings: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    embedding_scale: _Scale = 1.0
    logit_scale: _Scale = 1.0
    logit_softcap: _Scale | None = None

    def __post_init__(self) -> None:
        if not 1 < self.max_model_len < _MODEL_LEN_LIMIT:
            raise UnsupportedModelError(f"{self.max_model_len} positions are not supported")
        heads = {(own.num_heads, own.num_kv_heads, own.head_dim) for own in self.attentions}
        if not heads:
            raise UnsupportedModelError("models without attention are not supported")
        if len(heads) != 1:
            raise UnsupportedModelError("layers with different numbers of heads are not supported")

    def check(self) -> None:
        """Check each record's fields against their annotations.

        Raises:
            UnsupportedModelError: a field is of another type, or out of range.
        """
        check_fields(self)
        for layer in set(self.layers):
            check_fields(layer)
            for part in (layer.attention, layer.recurrence, layer.mlp):
                if part is not None:
                    check_fields(part)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The attention of each layer that has one."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def num_heads(self) -> int:
        """Query heads of every attention."""
        return self.attentions[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of every attention."""
        return self.attentions[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        """Size of a head of every attention."""
        return self.attentions[0].head_dim

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each attention, keys visible to a query; None if all are."""
        return tuple(attention.window for attention in self.attentions)

    def cache_layer(self, layer: int) -> int:
        """Return the index of a layer's keys and values in the cache: among those of attentions."""
        return sum(other.attention is not None for other in self.layers[:layer])

    def state_layer(self, layer: int) -> int:
        """Return the index of a layer's state: among those of recurrent layers."""
        return sum(other.recurrence is not None for other in self.layers[:layer])

    @property
    def states(self) -> tuple[StateShape, ...]:
        """The state that each recurrent layer keeps of a request; empty if there are none."""
        return tuple(
            layer.recurrence.state(self.hidden_size)
            for layer in self.layers
            if layer.recurrence is not None
        )

    @property
    def expert_counts(self) -> ExpertCounts | None:
        """The layers with experts; None if there are none."""
        experts = [layer.mlp for layer in self.layers if isinstance(layer.mlp, MoeSpec)]
        if not experts:
            return None
        return ExpertCounts(experts[0].num_experts, experts[0].num_active, len(experts))

    def cache(self, dtype: torch.dtype) -> CacheSpec:
        """Return the layout of the KV cache, with values of `dtype`."""
        return CacheSpec(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            sliding_windows=self.windows,
            dtype=dtype,
        )

    def part(self, num_ranks: int) -> "DecoderSpec":
        """Return the spec of each rank's part of every layer; all ranks have the same.

        Raises:
            ConfigError: heads or the MLPs cannot be divided among so many ranks.
        """
        if num_ranks == 1:
            return self
        if self.states:
            raise ConfigError(
                "--tensor-parallel-size takes 1 for this model, whose recurrent layers are not "
                "divided"
            )
        if any(attention.qk_norm == "whole" for attention in self.attentions):
            raise ConfigError(
                "--tensor-parallel-size takes 1 for this model, which normalizes all heads together"
            )
        sizes = sorted({size for layer in self.layers for size in _sizes(layer.mlp)})
        fitting = math.gcd(self.num_heads, self.num_kv_heads, *sizes)
        if fitting % num_ranks:
            counts = ", ".join(str(count) for count in range(1, fitting + 1) if not fitting % count)
            raise ConfigError(
                f"{self.num_heads} query heads, {self.num_kv_heads} key/value heads and an MLP of "
                f"{' or '.join(map(str, sizes))} cannot be divided among {num_ranks} ranks: "
                f"--tensor-parallel-size takes {counts} for this model"
            )
        return msgspec.structs.replace(
            self, layers=tuple(_part(layer, num_ranks) for layer in self.layers)
        )

    def reads_every_step(self, weight: str) -> bool:
        """Whether a step reads all of a weight; it does not read all of an untied embedding.

        Args:
            weight: its name in transformers' checkpoints.
        """
        return weight != "model.embed_tokens.weight" or self.tie_word_embeddings


def _part(layer: LayerSpec, num_ranks: int) -> LayerSpec:
    replace = msgspec.structs.replace
    attention = layer.attention
    assert attention is not None
    return replace(
        layer,
        attention=replace(
            attention,
            num_heads=attention.num_heads // num_ranks,
            num_kv_heads=attention.num_kv_heads // num_ranks,
        ),
        mlp=_part_of_mlp(layer.mlp, num_ranks),
    )


def _part_of_mlp(mlp: MlpSpec | MoeSpec | None, num_ranks: int) -> MlpSpec | MoeSpec | None:
    if mlp is None:
        return None
    part = msgspec.structs.replace(mlp, size=mlp.size // num_ranks)
    if isinstance(part, MlpSpec) or part.shared_size is None:
        return part
    return msgspec.structs.replace(part, shared_size=part.shared_size // num_ranks)


def _sizes(mlp: MlpSpec | MoeSpec | None) -> list[int]:
    """Return the widths that are divided among ranks."""
    if mlp is None:
        return []
    if isinstance(mlp, MlpSpec) or mlp.shared_size is None:
        return [mlp.size]
    return [mlp.size, mlp.shared_size]
