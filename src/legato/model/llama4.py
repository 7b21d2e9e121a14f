"""Llama 4: chunks between layers without positions, and experts whose weights scale their rows."""

from collections.abc import Sequence

import msgspec

from legato.core.errors import UnsupportedModelError
from legato.model.architecture import Architecture
from legato.model.description import FULL, Biased, ExpertKeys
from legato.model.expert_families import with_experts
from legato.model.rope import QueryGrowth, no_rope
from legato.model.spec import DecoderSpec, LayerSpec
from legato.model.spec_builder import check_kinds, rope, spec

_CHUNKED = "chunked_attention"
_FIRST_POSITION = 1
"""Position of the first token, as the temperature of queries counts."""


class Llama4(Biased, ExpertKeys):
    layer_types: list[str] | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = 4
    attention_chunk_size: int | None = 8192
    use_qk_norm: bool = True
    attn_temperature_tuning: bool | int = True
    attn_scale: float = 0.1
    floor_scale: float = 8192
    intermediate_size_mlp: int = 16384
    interleave_moe_layer_step: int = 1
    moe_layers: list[int] | None = None


def llama4(d: Llama4) -> DecoderSpec:
    """Describe Llama 4: layers with rope attend to chunks, the others have a temperature instead.

    Meta, 2025: Scout and Maverick. In layers with rope, queries and keys are normalized after it.
    """
    turns = _turning(d)
    kinds = d.layer_types or [_CHUNKED if has_rope else FULL for has_rope in turns]
    check_kinds(d, kinds, {FULL, _CHUNKED})
    chunks = [d.attention_chunk_size if kind == _CHUNKED else None for kind in kinds]
    still = no_rope(d.head_size)
    if d.attn_temperature_tuning:
        if not d.floor_scale >= 1:
            raise UnsupportedModelError(f"floor_scale is {d.floor_scale}, not 1 or more")
        still = still._replace(
            query_growth=QueryGrowth(d.attn_scale, d.floor_scale, _FIRST_POSITION)
        )
    dense = spec(
        d,
        windows=chunks,
        ropes=(rope(d, d.rope), still),
        rope_of_layer=[0 if has_rope else 1 for has_rope in turns],
        mlp={"size": d.intermediate_size_mlp},
    )
    layers = (
        _with_chunks(layer, has_norm=d.use_qk_norm and bool(has_rope))
        for layer, has_rope in zip(dense.layers, turns, strict=True)
    )
    return with_experts(
        d,
        msgspec.structs.replace(dense, layers=tuple(layers)),
        sparse=_sparse(d),
        score="sigmoid",
        is_normalized=False,
        scales_input=True,
        shared_size=d.intermediate_size,
    )


def _turning(d: Llama4) -> Sequence[int]:
    """Return for each layer whether it has rope."""
    count, interval = d.num_hidden_layers, d.no_rope_layer_interval
    if not d.no_rope_layers:
        return [int(interval < 1 or (i + 1) % interval != 0) for i in range(count)]
    if len(d.no_rope_layers) != count:
        raise UnsupportedModelError(
            f"no_rope_layers has {len(d.no_rope_layers)} entries for {count} layers"
        )
    return d.no_rope_layers


def _with_chunks(layer: LayerSpec, *, has_norm: bool) -> LayerSpec:
    assert layer.attention is not None
    own = msgspec.structs.replace(
        layer.attention,
        is_chunked=layer.attention.window is not None,
        qk_norm="plain_head" if has_norm else None,
        norm_after_rope=has_norm,
    )
    return msgspec.structs.replace(layer, attention=own)


def _sparse(d: Llama4) -> list[bool]:
    """Return which layers have experts: the listed ones, or every so many-th."""
    layers, step = range(d.num_hidden_layers), d.interleave_moe_layer_step
    if d.moe_layers is not None:
        return [layer in d.moe_layers for layer in layers]
    return [step > 0 and (layer + 1) % step == 0 for layer in layers]


LLAMA4_ARCHITECTURES = {
    "Llama4ForCausalLM": Architecture(
        "llama4_text",
        llama4,
        {
            "max_position_embeddings": 2**17,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
        },
        names={"feed_forward.router": "mlp.gate", "feed_forward": "mlp"},
        is_interleaved=True,
        may_transpose_experts=True,
        implied={"for_llm_compressor": ()},
    ),
}
