"""What distinguishes one decoder from another, as records of numbers and switches; no code.

A decoder is a list of layers. A layer is a mixer of tokens (attention, or a recurrence) and a
feed-forward network with norms around them. Layers of one decoder may differ in any of their
numbers.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec
import torch

from legato.core.errors import ConfigError, UnsupportedModelError
from legato.core.rows import ExpertCounts
from legato.core.validation import Eps, Scale, Size, check_fields
from legato.model.mixer_spec import AttentionSpec, RecurrenceSpec
from legato.model.mlp_spec import MlpSpec, MoeSpec
from legato.model.model import CacheSpec
from legato.model.rope import RopeFrequencies
from legato.model.states import StateShape

_MODEL_LEN_LIMIT = 2**31
_MOST_EXPERTS = 2**16
"""Of all layers together; each has names and shapes of its own. Large models have 25,000."""

LAYER_INPUTS_TABLE = "model.layer_inputs.embed_tokens.weight"
"""Name of the weight with the embeddings for each layer."""

NormOrder = Literal["pre", "post", "sandwich", "parallel", "parallel_two"]


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
        mixture: experts beside the MLP, whose outputs are added. They read the residual stream
            after a norm of their own, and their router after another one. Both outputs are
            normalized. None if there are none beside it.
        has_output_scale: the residual stream is multiplied by a learned number after the layer.

    Raises:
        UnsupportedModelError: the layer is empty, has one network in another order than pre, or
            experts beside something other than an MLP.
    """

    attention: AttentionSpec | None
    mlp: MlpSpec | MoeSpec | None
    recurrence: RecurrenceSpec | None = None
    order: NormOrder = "pre"
    residual_scale: Scale = 1.0
    output_scales: tuple[Scale, Scale, Scale] = (1.0,) * 3
    mixture: MoeSpec | None = None
    has_output_scale: bool = False

    def __post_init__(self) -> None:
        if not self.has_mixer and self.mlp is None:
            raise UnsupportedModelError("layers without any network are not supported")
        if self.order != "pre" and not (self.has_mixer and self.mlp is not None):
            raise UnsupportedModelError(
                f"layers of one network in the order {self.order} are not supported"
            )
        if self.mixture is not None and not isinstance(self.mlp, MlpSpec):
            raise UnsupportedModelError("experts are supported in place of an MLP or beside one")

    @property
    def has_mixer(self) -> bool:
        return self.attention is not None or self.recurrence is not None

    @property
    def moe(self) -> MoeSpec | None:
        """The experts, in place of an MLP or beside it; None if there are none."""
        return self.mlp if isinstance(self.mlp, MoeSpec) else self.mixture

    @property
    def is_parallel(self) -> bool:
        """Whether both networks read the stream before either's output is added."""
        return self.order in ("parallel", "parallel_two")

    @property
    def has_norms_before(self) -> bool:
        return self.order != "post"

    @property
    def has_norms_after(self) -> bool:
        return self.order in ("post", "sandwich")


class LayerInputsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Embeddings of each token for each layer (per-layer embeddings, as in Gemma 3n).

    A layer adds a projection of its token's embedding, gated by its own output.

    Attributes:
        size: of an embedding.
        vocab_size: tokens that have embeddings: at least those of the decoder.
    """

    size: Size
    vocab_size: Size


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
        layer_inputs: embeddings for each layer; None if there are none.

    Raises:
        UnsupportedModelError: there are no layers, layers have different numbers of query heads or
            read keys and values that do not suit them, or the number of positions is out of range.
    """

    vocab_size: Size
    hidden_size: Size
    max_model_len: int
    norm_eps: Eps
    ropes: tuple[RopeFrequencies, ...]
    layers: tuple[LayerSpec, ...]
    tie_word_embeddings: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    embedding_scale: Scale = 1.0
    logit_scale: Scale = 1.0
    logit_softcap: Scale | None = None
    layer_inputs: LayerInputsSpec | None = None

    def __post_init__(self) -> None:
        if not 1 < self.max_model_len < _MODEL_LEN_LIMIT:
            raise UnsupportedModelError(f"{self.max_model_len} positions are not supported")
        num_heads = {own.num_heads for own in self.attentions}
        if not num_heads:
            raise UnsupportedModelError("models without attention are not supported")
        if len(num_heads) != 1:
            raise UnsupportedModelError(
                "layers with different numbers of query heads are not supported"
            )
        if len({own.latent is None for own in self.attentions}) != 1:
            raise UnsupportedModelError(
                "latent attention in some of the layers with attention is not supported"
            )
        for index, layer in enumerate(self.layers):
            own = layer.attention
            if own is not None and own.kv_from is not None and not self._has_source(own, index):
                raise UnsupportedModelError(
                    f"layer {index} cannot read the keys and values of layer {own.kv_from}"
                )

    def _has_source(self, own: AttentionSpec, index: int) -> bool:
        """Whether the layer that a layer reads keeps what it expects, and comes before it."""
        if own.kv_from is None or own.kv_from >= index:
            return False
        source = self.layers[own.kv_from].attention
        return source is not None and source.kv_from is None and source.cached == own.cached

    def check(self) -> None:
        """Check each record's fields against their annotations.

        Raises:
            UnsupportedModelError: a field is of another type, or out of range.
        """
        check_fields(self)
        for layer in set(self.layers):
            check_fields(layer)
            latent = None if layer.attention is None else layer.attention.latent
            for part in (layer.attention, latent, layer.recurrence, layer.mlp, layer.mixture):
                if part is not None:
                    check_fields(part)
        if self.layer_inputs is not None:
            check_fields(self.layer_inputs)
        if self.num_experts > _MOST_EXPERTS:
            raise UnsupportedModelError(
                f"{self.num_experts:,} experts in {self.num_layers:,} layers are not supported, "
                f"{_MOST_EXPERTS:,} at most are"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_experts(self) -> int:
        """Experts of all layers together."""
        return sum(layer.moe.num_experts for layer in self.layers if layer.moe is not None)

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The attention of each layer that has one."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def num_heads(self) -> int:
        """Query heads of every attention."""
        return self.attentions[0].num_heads

    @property
    def has_one_geometry(self) -> bool:
        """Whether all attentions have as many key/value heads, of the same size."""
        return len({own.cached[:2] for own in self.attentions}) == 1

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of every attention, if they have one geometry."""
        return self.attentions[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        """Size of a head of every attention, if they have one geometry."""
        return self.attentions[0].head_dim

    @property
    def has_latents(self) -> bool:
        """Whether keys are latents, which are their own values."""
        return self.attentions[0].latent is not None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each attention, keys visible to a query; None if all are."""
        return tuple(attention.window for attention in self.attentions)

    def cache_layer(self, layer: int) -> int:
        """Return the index in the cache of the keys and values that a layer reads."""
        own = self.layers[layer].attention
        assert own is not None
        source = layer if own.kv_from is None else own.kv_from
        return sum(
            other.attention is not None and other.attention.kv_from is None
            for other in self.layers[:source]
        )

    def state_layer(self, layer: int) -> int:
        """Return the index of a layer's state: among those of recurrent layers."""
        return sum(other.recurrence is not None for other in self.layers[:layer])

    @property
    def states(self) -> tuple[StateShape, ...]:
        """The state that each recurrent layer keeps of a request; empty if there are none."""
        return tuple(
            layer.recurrence.state for layer in self.layers if layer.recurrence is not None
        )

    @property
    def expert_counts(self) -> ExpertCounts | None:
        """The layers with experts; None if there are none."""
        experts = [moe for layer in self.layers if (moe := layer.moe) is not None]
        if not experts:
            return None
        return ExpertCounts(experts[0].num_experts, experts[0].num_active, len(experts))

    def cache(self, dtype: torch.dtype) -> CacheSpec:
        """Return the layout of the KV cache, with values of `dtype`."""
        own = (attention.cached for attention in self.attentions if attention.kv_from is None)
        return CacheSpec(layers=tuple(own), dtype=dtype, has_values=not self.has_latents)

    def part(self, num_ranks: int) -> "DecoderSpec":
        """Return the spec of each rank's part of every layer; all ranks have the same.

        Raises:
            ConfigError: heads, recurrent mixers or MLPs cannot be divided among so many ranks.
        """
        if num_ranks == 1:
            return self
        if self.has_latents:
            raise ConfigError(
                "--tensor-parallel-size takes 1 for this model, whose heads share latents"
            )
        if any(attention.qk_norm == "whole" for attention in self.attentions):
            raise ConfigError(
                "--tensor-parallel-size takes 1 for this model, which normalizes all heads together"
            )
        if not self._can_be_divided(num_ranks):
            fitting = filter(self._can_be_divided, range(1, self.num_heads + 1))
            raise ConfigError(
                f"{self._divided_sizes} cannot be divided among {num_ranks} ranks: "
                f"--tensor-parallel-size takes {', '.join(map(str, fitting))} for this model"
            )
        return msgspec.structs.replace(
            self, layers=tuple(_part(layer, num_ranks) for layer in self.layers)
        )

    def _can_be_divided(self, num_ranks: int) -> bool:
        """Whether each rank gets as many heads, channels and MLP activations."""
        sizes = {self.num_heads, *self._kv_heads, *self._mlp_sizes}
        return all(size % num_ranks == 0 for size in sizes) and all(
            recurrence.can_be_divided(num_ranks) for recurrence in self._recurrences
        )

    @property
    def _divided_sizes(self) -> str:
        """What is divided among ranks, in words."""
        heads = (
            f"{self.num_heads} query heads",
            f"{_listed(self._kv_heads)} key/value heads",
            *map(str, self._recurrences),
        )
        return f"{', '.join(heads)} and an MLP of {_listed(self._mlp_sizes)}"

    @property
    def _kv_heads(self) -> set[int]:
        return {attention.num_kv_heads for attention in self.attentions}

    @property
    def _recurrences(self) -> tuple[RecurrenceSpec, ...]:
        """The different recurrent mixers."""
        found = (layer.recurrence for layer in self.layers if layer.recurrence is not None)
        return tuple(dict.fromkeys(found))

    @property
    def _mlp_sizes(self) -> set[int]:
        """Widths of MLPs and experts."""
        return {size for layer in self.layers for size in _sizes(layer)}

    def reads_every_step(self, weight: str) -> bool:
        """Whether a step reads all of a weight; of embeddings it reads all of a tied one alone.

        Args:
            weight: its name in transformers' checkpoints.
        """
        if weight == LAYER_INPUTS_TABLE:
            return False
        return weight != "model.embed_tokens.weight" or self.tie_word_embeddings


def _part(layer: LayerSpec, num_ranks: int) -> LayerSpec:
    return msgspec.structs.replace(
        layer,
        attention=_part_of_attention(layer.attention, num_ranks),
        recurrence=None if layer.recurrence is None else layer.recurrence.part(num_ranks),
        mlp=_part_of_mlp(layer.mlp, num_ranks),
        mixture=None if layer.mixture is None else _part_of_experts(layer.mixture, num_ranks),
    )


def _part_of_attention(own: AttentionSpec | None, num_ranks: int) -> AttentionSpec | None:
    if own is None:
        return None
    return msgspec.structs.replace(
        own,
        num_heads=own.num_heads // num_ranks,
        num_kv_heads=own.num_kv_heads // num_ranks,
    )


def _part_of_mlp(mlp: MlpSpec | MoeSpec | None, num_ranks: int) -> MlpSpec | MoeSpec | None:
    if mlp is None:
        return None
    if isinstance(mlp, MoeSpec):
        return _part_of_experts(mlp, num_ranks)
    return msgspec.structs.replace(mlp, size=mlp.size // num_ranks)


def _part_of_experts(moe: MoeSpec, num_ranks: int) -> MoeSpec:
    shared_size = None if moe.shared_size is None else moe.shared_size // num_ranks
    return msgspec.structs.replace(moe, size=moe.size // num_ranks, shared_size=shared_size)


def _sizes(layer: LayerSpec) -> set[int]:
    """Return the widths that are divided among ranks."""
    sizes: list[int | None] = [] if layer.mlp is None else [layer.mlp.size]
    if layer.moe is not None:
        sizes += [layer.moe.size, layer.moe.shared_size]
    return {size for size in sizes if size is not None}


def _listed(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))
