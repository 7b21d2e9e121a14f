"""Builds a decoder's spec from the keys that all families read. The arguments say what differs."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

from legato.core.errors import UnsupportedModelError
from legato.model.description import Description, Rotary
from legato.model.mixer_spec import AttentionSpec, RecurrenceSpec
from legato.model.mlp_spec import Activation, MlpSpec
from legato.model.rope import RopeFrequencies, rope_frequencies
from legato.model.spec import DecoderSpec, LayerSpec

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
    "xielu": "xielu",
}
"""Key a name in transformers, value ours."""


def spec(
    d: Description,
    *,
    windows: Sequence[int | None] | None = None,
    ropes: tuple[RopeFrequencies, ...] | None = None,
    rope_of_layer: Sequence[int] | None = None,
    recurrence: RecurrenceSpec | None = None,
    has_attention: Sequence[bool] | None = None,
    attention: Mapping[str, Any] | None = None,
    mlp: Mapping[str, Any] | None = None,
    layer: Mapping[str, Any] | None = None,
    **whole: Any,
) -> DecoderSpec:
    """Build a spec from the fields that all families share; the arguments say what differs.

    Args:
        windows: of each layer; None if no layer has one.
        ropes: None for the rope that the description has.
        rope_of_layer: index of each layer's rope; None for the first.
        recurrence: the mixer of layers without attention.
        has_attention: of each layer; None if all have.
        attention, mlp, layer, whole: fields of these records that differ from the defaults; biases
            are by default as `attention_bias` and `mlp_bias` say, where a family has these keys.

    Raises:
        UnsupportedModelError: an activation or rope type that Legato does not know.
    """
    name = d.spelled("activation")
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"unsupported activation {name!r}; Legato supports {', '.join(_ACTIVATIONS)}"
        )
    size, has_bias = d.head_size, getattr(d, "attention_bias", False)
    own_mlp = {
        "size": d.spelled("mlp_size"),
        "activation": _ACTIVATIONS[name],
        "has_bias": getattr(d, "mlp_bias", False),
        **(mlp or {}),
    }
    heads = {
        "num_heads": d.num_attention_heads,
        "num_kv_heads": d.num_key_value_heads or d.num_attention_heads,
        "head_dim": size,
        "scale": size**-0.5,
        "qkv_bias": has_bias,
        "output_bias": has_bias,
        **(attention or {}),
    }
    num_layers = d.num_hidden_layers
    if ropes is None:
        assert isinstance(d, Rotary)
        ropes = (rope(d, d.rope),)
    rope_indices = rope_of_layer or (0,) * num_layers
    used = sorted(set(rope_indices))
    layers = (
        LayerSpec(
            attention=(
                AttentionSpec(window=window, rope=used.index(index), **heads) if attends else None
            ),
            recurrence=None if attends else recurrence,
            mlp=MlpSpec(**own_mlp),
            **(layer or {}),
        )
        for window, index, attends in zip(
            windows or (None,) * num_layers,
            rope_indices,
            has_attention or (True,) * num_layers,
            strict=True,
        )
    )
    fields = {
        "norm_eps": d.spelled("norm_eps"),
        "tie_word_embeddings": d.spelled("is_tied"),
        **whole,
    }
    return DecoderSpec(
        vocab_size=d.vocab_size,
        hidden_size=d.hidden_size,
        max_model_len=d.max_position_embeddings,
        ropes=tuple(ropes[index] for index in used),
        layers=tuple(layers),
        **fields,
    )


def rope(d: Description, parameters: dict[str, Any]) -> RopeFrequencies:
    return rope_frequencies(parameters, d.head_size, d.max_position_embeddings, d.served_len)


def check_kinds(d: Description, kinds: Sequence[str], known: Set[str]) -> None:
    """Raises `UnsupportedModelError` for layers of an unknown type, or for another number of them.

    Args:
        kinds: of the layers, as in `layer_types`.
    """
    if unknown := set(kinds) - known:
        raise UnsupportedModelError(f"unsupported layer types {', '.join(sorted(unknown))}")
    if len(kinds) != d.num_hidden_layers:
        raise UnsupportedModelError(
            f"layer_types has {len(kinds)} entries for {d.num_hidden_layers} layers"
        )
