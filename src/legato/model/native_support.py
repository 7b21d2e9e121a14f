"""Which decoders native layers compute."""

import math

import msgspec
import torch

from legato.model.mixer_spec import AttentionSpec, DeltaNetSpec, Mamba2Spec, ShortConvSpec
from legato.model.mlp_spec import MlpSpec, MoeSpec
from legato.model.native_experts import (
    EXPERT_RULES,
    LONE_EXPERT_RULES,
    has_computed_order,
    same_experts,
)
from legato.model.native_kernels import why_no_instructions
from legato.model.native_weights import DTYPE
from legato.model.spec import DecoderSpec, LayerInputsSpec, LayerSpec
from legato.model.support import (
    Rule,
    Rules,
    anything,
    one_of,
    switch,
    unsupported,
    why_heads_differ,
)
from legato.model.transformers_spec import TransformersSpec

TILE_DEPTH = 32
"""Values in a row of a tile; every size must be a multiple of it."""
LARGEST_HEAD = 512
_VECTOR = 16
_LARGEST_STATE = 256
"""Rows and columns of a head's recurrent state."""


def _multiple(field: str, at_most: float = math.inf, *, of: int = TILE_DEPTH) -> Rule:
    def fits(record: msgspec.Struct) -> bool:
        size: int = getattr(record, field)
        return size % of == 0 and size <= at_most

    limit = "" if at_most == math.inf else f" up to {at_most}"
    return Rule(fits, f"a multiple of {of}{limit}")


def _state(field: str) -> Rule:
    return _multiple(field, _LARGEST_STATE, of=_VECTOR)


def _all_of(kind: type[msgspec.Struct]) -> dict[str, Rule]:
    """Allow what PyTorch computes."""
    return {field: anything() for field in kind.__struct_fields__}


def _turn_whole_heads(spec: DecoderSpec) -> bool:
    known = ("inverse", "scaling", "query_growth")
    return all(rope._fields == known for rope in spec.ropes) and all(
        2 * len(spec.ropes[own.rope].inverse) == own.rope_size for own in spec.attentions
    )


SUPPORTED: Rules = {
    DecoderSpec: {
        "vocab_size": anything(),
        "hidden_size": _multiple("hidden_size"),
        "max_model_len": anything(),
        "norm_eps": anything(),
        "ropes": Rule(_turn_whole_heads, "frequencies and a scale for whole heads"),
        "layers": Rule(
            lambda spec: same_experts({layer.mlp for layer in spec.layers}),
            "layers with the same experts",
        ),
        "layer_inputs": anything(),
        "norm": one_of("norm", "rms"),
        "norm_bias": one_of("norm_bias", False),
        "embedding_scale": anything(),
        "logit_scale": anything(),
        "logit_softcap": anything(),
        "tie_word_embeddings": switch("tie_word_embeddings"),
    },
    LayerInputsSpec: {"size": _multiple("size"), "vocab_size": anything()},
    LayerSpec: {
        "attention": Rule(lambda layer: layer.has_mixer, "attention or a recurrence"),
        "recurrence": Rule(lambda layer: layer.recurrence is None, "none"),
        "mlp": Rule(lambda layer: layer.mlp is not None, "an MLP"),
        "order": Rule(has_computed_order, "pre or post or sandwich, with experts pre"),
        "residual_scale": anything(),
        "mixture": Rule(lambda layer: layer.mixture is None, "none"),
        "has_output_scale": switch("has_output_scale"),
        "output_scales": one_of("output_scales", (1.0, 1.0, 1.0)),
    },
    AttentionSpec: {
        "num_heads": anything(),
        "num_kv_heads": anything(),
        "head_dim": _multiple("head_dim", LARGEST_HEAD),
        "scale": anything(),
        "rope": anything(),
        "window": Rule(
            lambda attention: attention.window is None or attention.window > 0, "positive or none"
        ),
        "is_chunked": one_of("is_chunked", False),
        "qk_norm": one_of("qk_norm", None, "head", "whole"),
        "norm_after_rope": Rule(
            lambda attention: (
                attention.norm_after_rope is False
                or (attention.norm_after_rope is True and attention.qk_norm != "whole")
            ),
            "on or off for norms of heads, off for norms of whole rows",
        ),
        "softcap": anything(),
        "has_sinks": switch("has_sinks"),
        "qkv_bias": switch("qkv_bias"),
        "output_bias": switch("output_bias"),
        "has_gate": one_of("has_gate", False),
        "latent": one_of("latent", None),
        "has_value_norm": switch("has_value_norm"),
        "value_is_key": switch("value_is_key"),
        "kv_from": anything(),
    },
    MlpSpec: {
        "size": _multiple("size"),
        "activation": one_of("activation", "silu", "gelu_tanh"),
        "is_gated": one_of("is_gated", True),
        "has_bias": switch("has_bias"),
        "gate_scale": one_of("gate_scale", 1.0),
    },
    MoeSpec: EXPERT_RULES,
}
"""What the extension computes. It does not know a field that is missing here."""


_PARTS: Rules = {
    DecoderSpec: {**_all_of(DecoderSpec), "hidden_size": _multiple("hidden_size")},
    LayerSpec: _all_of(LayerSpec),
    MlpSpec: _all_of(MlpSpec),
    MoeSpec: _all_of(MoeSpec),
    AttentionSpec: {
        **_all_of(AttentionSpec),
        "head_dim": _multiple("head_dim", LARGEST_HEAD),
        "is_chunked": one_of("is_chunked", False),
        "has_sinks": one_of("has_sinks", False),
        "latent": one_of("latent", None),
        "kv_from": one_of("kv_from", None),
    },
    ShortConvSpec: {
        "num_channels": _multiple("num_channels", of=_VECTOR),
        "kernel_size": anything(),
        "has_bias": switch("has_bias"),
    },
    DeltaNetSpec: {
        "num_heads": anything(),
        "num_key_heads": anything(),
        "key_dim": _state("key_dim"),
        "value_dim": _state("value_dim"),
        "kernel_size": anything(),
    },
    Mamba2Spec: {
        "num_heads": anything(),
        "num_groups": anything(),
        "head_dim": _state("head_dim"),
        "state_size": _state("state_size"),
        "kernel_size": anything(),
        "has_conv_bias": switch("has_conv_bias"),
        "has_bias": switch("has_bias"),
        "shortest_step": anything(),
        "longest_step": anything(),
        "norm": one_of("norm", None, "after_gate", "before_gate"),
        "scales": anything(),
        "num_group_ranks": anything(),
    },
}
"""What the extension computes of decoders whose other parts are PyTorch's."""


def why_not_computed(spec: DecoderSpec) -> str:
    """Return why the extension cannot compute these layers; empty if it can."""
    return unsupported("native layers", spec, SUPPORTED)


def why_not_experts(spec: DecoderSpec) -> str:
    """Return why experts are PyTorch's in layers with other native parts; empty if none are."""
    for layer in spec.layers:
        if layer.mixture is not None:
            return "they are beside an MLP"
        if isinstance(layer.mlp, MoeSpec):
            reason = unsupported("native experts", layer.mlp, {MoeSpec: LONE_EXPERT_RULES})
            if reason:
                return reason
    return ""


def why_not_in_parts(spec: DecoderSpec) -> str:
    """Return why PyTorch's layers of a decoder cannot have native parts; empty if they can.

    They have them if there are recurrent layers.
    """
    if not spec.states:
        return "there are no recurrent layers"
    return why_heads_differ(spec) or unsupported("native parts of layers", spec, _PARTS)


def why_not_native(
    spec: DecoderSpec | TransformersSpec, dtype: torch.dtype, device: torch.device
) -> str:
    """Return why native kernels cannot run this model, or part; empty if they can.

    Of models with recurrent layers, they run most parts of PyTorch's layers.
    """
    if device.type != "cpu":
        return f"the device is {device.type}"
    if reason := why_no_instructions():
        return reason
    if dtype != DTYPE:
        return f"the dtype is {str(dtype).removeprefix('torch.')}, not bfloat16"
    if isinstance(spec, TransformersSpec):
        return ""
    return why_not_in_parts(spec) if spec.states else why_not_computed(spec)
