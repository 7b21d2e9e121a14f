"""Gemma 4: heads of two sizes, layers that share keys and values, and embeddings for each layer."""

from collections.abc import Sequence
from typing import Any

import msgspec

from legato.core.errors import UnsupportedModelError
from legato.model.architecture import Architecture
from legato.model.description import FULL, SLIDING, ExpertKeys, RopeKeys, Windowed
from legato.model.mlp_spec import MlpSpec, MoeSpec
from legato.model.rope import RopeFrequencies, rope_frequencies
from legato.model.spec import DecoderSpec, LayerInputsSpec, LayerSpec
from legato.model.spec_builder import spec

_INTERVAL = 6
_THETA = {FULL: 1e6, SLIDING: 1e4}
_OF_LAYER = {"head_dim", "num_key_value_heads"}
"""Fields in which layers may differ."""


class Gemma4(RopeKeys, Windowed, ExpertKeys):
    """Fields of some layers are in `per_layer_config`, key a layer's index. Without it, layers with
    full attention have `global_head_dim` and `num_global_key_value_heads`.
    """

    hidden_activation: str | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | str | None = None
    per_layer_config: dict[str, dict[str, Any]] | None = None
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int | None = None
    vocab_size_per_layer_input: int = 2**18
    enable_moe_block: bool = False
    top_k_experts: int | None = None


def gemma4(d: Gemma4) -> DecoderSpec:
    """Describe Gemma 4: Gemma 3 with geometry by kind of layer, and unscaled scores.

    Google DeepMind, 2026; its source is transformers' `modeling_gemma4.py`.

    Raises:
        UnsupportedModelError: layers differ in other fields than `_OF_LAYER`, or share keys and
            values that no layer has.
    """
    if d.use_bidirectional_attention in (True, "all"):
        raise UnsupportedModelError("attention to later tokens is not supported")
    kinds = (*d.kinds(_INTERVAL)[:-1], FULL)
    heads = _heads(d, kinds)
    base = spec(
        d,
        windows=d.windows_of(kinds),
        ropes=tuple(_rope(d, kind, kinds, heads) for kind in (FULL, SLIDING)),
        rope_of_layer=[int(kind == SLIDING) for kind in kinds],
        attention={"scale": 1.0, "qk_norm": "head", "has_value_norm": True},
        layer={"order": "sandwich", "has_output_scale": True},
        embedding_scale=d.hidden_size**0.5,
        logit_softcap=d.final_logit_softcapping,
        layer_inputs=_layer_inputs(d),
    )
    layers = (
        _layer(d, layer, source, {**own, "value_is_key": d.attention_k_eq_v and kind == FULL})
        for layer, source, own, kind in zip(
            base.layers, _sources(d, kinds), heads, kinds, strict=True
        )
    )
    return msgspec.structs.replace(base, layers=tuple(layers))


def _layer(d: Gemma4, layer: LayerSpec, source: int | None, attention: dict[str, Any]) -> LayerSpec:
    """Return a layer of its own geometry.

    Args:
        source: the layer whose keys and values it reads; None for its own.
        attention: fields of `AttentionSpec` that differ from those of `layer`.
    """
    replace = msgspec.structs.replace
    assert layer.attention is not None
    assert isinstance(layer.mlp, MlpSpec)
    mixture = None
    if d.enable_moe_block:
        mixture = MoeSpec(
            num_experts=d.expert_count,
            num_active=d.active_expert_count,
            size=d.expert_size,
            activation=layer.mlp.activation,
            has_expert_scale=True,
        )
    is_wide = d.use_double_wide_mlp and source is not None
    return replace(
        layer,
        attention=replace(layer.attention, kv_from=source, **attention),
        mlp=replace(layer.mlp, size=2 * layer.mlp.size) if is_wide else layer.mlp,
        mixture=mixture,
    )


def _heads(d: Gemma4, kinds: Sequence[str]) -> list[dict[str, int]]:
    """Return each layer's head size and number of key/value heads, as `AttentionSpec` has them."""
    if d.per_layer_config is None:
        full = {"head_dim": d.global_head_dim}
        if d.attention_k_eq_v and d.num_global_key_value_heads is not None:
            full["num_key_value_heads"] = d.num_global_key_value_heads
        own = [full if kind == FULL else {} for kind in kinds]
    else:
        known = {int(index): fields for index, fields in d.per_layer_config.items()}
        if others := {name for fields in known.values() for name in fields} - _OF_LAYER:
            raise UnsupportedModelError(
                f"layers that differ in {', '.join(sorted(others))} are not supported"
            )
        own = [known.get(index, {}) for index in range(len(kinds))]
    num_kv_heads = d.num_key_value_heads or d.num_attention_heads
    return [
        {
            "head_dim": fields.get("head_dim", d.head_size),
            "num_kv_heads": fields.get("num_key_value_heads", num_kv_heads),
        }
        for fields in own
    ]


def _rope(
    d: Gemma4, kind: str, kinds: Sequence[str], heads: Sequence[dict[str, int]]
) -> RopeFrequencies:
    """Return the frequencies of the layers of a kind, whose heads have one size."""
    sizes = {own["head_dim"] for own, other in zip(heads, kinds, strict=True) if other == kind}
    if len(sizes) > 1:
        raise UnsupportedModelError(f"layers with {kind} and heads of different sizes")
    size = sizes.pop() if sizes else d.head_size
    parameters = d.rope_of(kind, theta=_THETA[kind])
    return rope_frequencies(parameters, size, d.max_position_embeddings, d.served_len)


def _sources(d: Gemma4, kinds: Sequence[str]) -> list[int | None]:
    """Return the layer whose keys and values each layer reads; None for its own.

    The last layers read those of the last layer of their kind before them.
    """
    num_own = len(kinds) - d.num_kv_shared_layers
    if not 0 < num_own <= len(kinds):
        raise UnsupportedModelError(
            f"{d.num_kv_shared_layers} of {len(kinds)} layers cannot read keys and values of others"
        )
    sources: list[int | None] = [None] * num_own
    last = {kind: index for index, kind in enumerate(kinds[:num_own])}
    if lacking := set(kinds) - set(last):
        raise UnsupportedModelError(
            f"no layer with {', '.join(sorted(lacking))} has keys and values that others can read"
        )
    return sources + [last[kind] for kind in kinds[num_own:]]


def _layer_inputs(d: Gemma4) -> LayerInputsSpec | None:
    if not d.hidden_size_per_layer_input:
        return None
    if d.vocab_size_per_layer_input < d.vocab_size:
        raise UnsupportedModelError(
            f"embeddings for each layer are of {d.vocab_size_per_layer_input} tokens, fewer than "
            f"{d.vocab_size}"
        )
    return LayerInputsSpec(
        size=d.hidden_size_per_layer_input, vocab_size=d.vocab_size_per_layer_input
    )


_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    },
}
_NAMES = {
    "post_attention_layernorm": "attention_output_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "mlp_output_layernorm",
    "embed_tokens_per_layer": "layer_inputs.embed_tokens",
    "per_layer_model_projection": "layer_inputs.projection",
    "per_layer_projection_norm": "layer_inputs.norm",
    "per_layer_input_gate": "layer_input.gate",
    "per_layer_projection": "layer_input.projection",
    "post_per_layer_input_norm": "layer_input.norm",
    "router.proj": "mixture.mlp.gate",
    "router.per_expert_scale": "mixture.mlp.gate.expert_scale",
    "router.scale": "mixture.router_norm.weight",
    "experts": "mixture.mlp.experts",
    "pre_feedforward_layernorm_2": "mixture.input_norm",
    "post_feedforward_layernorm_1": "mixture.mlp_output_norm",
    "post_feedforward_layernorm_2": "mixture.output_norm",
}

GEMMA4_ARCHITECTURES = {
    "Gemma4ForCausalLM": Architecture(
        "gemma4_text",
        gemma4,
        {
            **_DEFAULTS,
            "max_position_embeddings": 2**17,
            "sliding_window": 512,
            "hidden_size_per_layer_input": 256,
        },
        names=_NAMES,
        has_proportional_rope=True,
    ),
    # Without embeddings for each layer, and without experts.
    "Gemma4UnifiedForCausalLM": Architecture(
        "gemma4_unified_text",
        gemma4,
        {**_DEFAULTS, "max_position_embeddings": 2**18, "sliding_window": 1024},
        names=_NAMES,
        has_proportional_rope=True,
    ),
}
