"""Families with recurrent layers: in most of their layers, or beside attention."""

import math

from legato.core.errors import UnsupportedModelError
from legato.model import families
from legato.model.description import FULL, Description
from legato.model.mixer_spec import DeltaNetSpec, Mamba2Spec, ShortConvSpec
from legato.model.rope import no_rope
from legato.model.spec import DecoderSpec


def granite_hybrid(d: Description) -> DecoderSpec:
    """Describe Granite 4: Granite 3 with Mamba-2 in most layers, or in none; the dense models."""
    if d.num_local_experts:
        raise UnsupportedModelError(f"{d.num_local_experts} experts are not supported")
    kinds = d.layer_types or ["linear_attention"] * d.num_hidden_layers
    recurrent = {"mamba", "linear_attention"}
    families.check_kinds(d, kinds, {"attention", FULL, *recurrent})
    has_rope = d.position_embedding_type == "rope"
    return families.granite(
        d,
        ropes=None if has_rope else (no_rope(d.head_size),),
        recurrence=_mamba2(d) if recurrent & set(kinds) else None,
        has_attention=[kind not in recurrent for kind in kinds],
    )


def _mamba2(d: Description) -> Mamba2Spec:
    size = d.mamba_expand * d.hidden_size
    head_dim = d.mamba_d_head if isinstance(d.mamba_d_head, int) else size // d.mamba_n_heads
    if head_dim * d.mamba_n_heads != size:
        raise UnsupportedModelError(
            f"{d.mamba_n_heads} heads of {head_dim} are not {d.mamba_expand} times the hidden size"
        )
    shortest, longest = (
        float(limit["__float__"] if isinstance(limit, dict) else limit)
        for limit in d.time_step_limit or (0.0, math.inf)
    )
    return Mamba2Spec(
        num_heads=d.mamba_n_heads,
        num_groups=d.mamba_n_groups,
        head_dim=head_dim,
        state_size=d.mamba_d_state,
        kernel_size=d.mamba_d_conv,
        has_conv_bias=d.mamba_conv_bias,
        has_bias=d.mamba_proj_bias,
        shortest_step=shortest,
        longest_step=None if longest == math.inf else longest,
    )


def lfm2(d: Description) -> DecoderSpec:
    """Describe LFM2: gated short convolutions, with attention in some layers.

    Liquid AI, 2025, arXiv:2511.23404; the dense models.
    """
    kinds = d.layer_types
    if kinds is None:
        full = range(d.num_hidden_layers) if d.full_attn_idxs is None else d.full_attn_idxs
        kinds = [FULL if i in full else "conv" for i in range(d.num_hidden_layers)]
    families.check_kinds(d, kinds, {FULL, "conv"})
    size = d.block_ff_dim or d.intermediate_size
    if d.block_auto_adjust_ff_dim:
        size = int(2 * size / 3)
        if d.block_ffn_dim_multiplier is not None:
            size = int(d.block_ffn_dim_multiplier * size)
        size = -(-size // d.block_multiple_of) * d.block_multiple_of
    return families.spec(
        d,
        recurrence=ShortConvSpec(kernel_size=d.conv_kernel_size, has_bias=d.conv_bias),
        has_attention=[kind == FULL for kind in kinds],
        attention={"qk_norm": "head"},
        mlp={"size": size},
        norm_eps=d.norm_eps,
        tie_word_embeddings=d.tie_word_embeddings if d.tie_embedding is None else d.tie_embedding,
    )


def qwen3_5(d: Description) -> DecoderSpec:
    """Describe Qwen3.5: gated delta nets, and gated attention in every fourth layer.

    The dense models, without their vision model and their predictors of further tokens.
    """
    kinds = d.layer_types or [
        FULL if (i + 1) % d.full_attention_interval == 0 else "linear_attention"
        for i in range(d.num_hidden_layers)
    ]
    families.check_kinds(d, kinds, {FULL, "linear_attention"})
    return families.spec(
        d,
        recurrence=DeltaNetSpec(
            num_heads=d.linear_num_value_heads,
            num_key_heads=d.linear_num_key_heads,
            key_dim=d.linear_key_head_dim,
            value_dim=d.linear_value_head_dim,
            kernel_size=d.linear_conv_kernel_dim,
        ),
        has_attention=[kind == FULL for kind in kinds],
        attention={
            **families.biases(d.attention_bias, d.attention_bias),
            "qk_norm": "head",
            "has_gate": True,
        },
    )


def qwen3_next(d: Description) -> DecoderSpec:
    """Describe Qwen3-Next as far as it has no experts: as Qwen3.5, with other projections."""
    for layer in range(d.num_hidden_layers):
        is_dense = layer in (d.mlp_only_layers or ())
        if not is_dense and d.num_experts and (layer + 1) % d.decoder_sparse_step == 0:
            raise UnsupportedModelError(f"{d.num_experts} experts are not supported")
    return qwen3_5(d)
