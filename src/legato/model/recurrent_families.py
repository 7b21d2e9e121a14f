"""Families with recurrent layers: in most of their layers, or beside attention."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from legato.core.errors import UnsupportedModelError
from legato.core.validation import MAX_LAYERS
from legato.model import families
from legato.model.description import FULL, Biased, Description, ExpertKeys, Rotary
from legato.model.expert_families import (
    DeepseekExperts,
    SparseSteps,
    deepseek_v3_router,
    sparse_steps,
    with_deepseek_experts,
    with_experts,
)
from legato.model.mixer_spec import DeltaNetSpec, Mamba2Spec, ShortConvSpec
from legato.model.rope import no_rope
from legato.model.spec import DecoderSpec
from legato.model.spec_builder import check_kinds, spec

_LINEAR = "linear_attention"
_NEMOTRON_KINDS = {
    "M": _LINEAR,
    "E": "moe",
    "*": FULL,
    "-": "mlp",
    "mamba": _LINEAR,
    "attention": FULL,
}
"""Key a letter of a pattern, or an older name, value the kind of layer."""


class MambaSteps(Description):
    """The limits of Mamba-2's steps: shortest and longest.

    Infinity is {"__float__": "Infinity"}.
    """

    time_step_limit: list[float | dict[str, str]] | None = None


class Mamba(MambaSteps):
    """The keys of Mamba-2 in Granite and Falcon."""

    mamba_n_heads: int = 128
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_head: int | str | None = "auto"
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False


class GraniteHybrid(families.Granite, Mamba, ExpertKeys):
    layer_types: list[str] | None = None
    position_embedding_type: str | None = None
    shared_intermediate_size: int | None = None


def granite_hybrid(d: GraniteHybrid) -> DecoderSpec:
    """Describe Granite 4: Granite 3 with Mamba-2 in most layers, or in none, and perhaps experts.

    An MLP computes all tokens, beside the experts if there are any.
    """
    kinds = d.layer_types or [_LINEAR] * d.num_hidden_layers
    recurrent = {"mamba", _LINEAR}
    check_kinds(d, kinds, {"attention", FULL, *recurrent})
    has_rope = d.position_embedding_type == "rope"
    decoder = families.granite(
        d,
        ropes=None if has_rope else (no_rope(d.head_size),),
        recurrence=_mamba2(d, d.mamba_expand * d.hidden_size) if recurrent & set(kinds) else None,
        has_attention=[kind not in recurrent for kind in kinds],
    )
    return with_experts(
        d, decoder, score="softmax_of_active", shared_size=d.shared_intermediate_size
    )


class FalconH1(families.Llama, Mamba):
    mamba_d_ssm: int | None = None
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    projectors_bias: bool = False
    embedding_multiplier: float = 1.0
    lm_head_multiplier: float = 1.0
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    mlp_multipliers: tuple[float, float] | None = None
    ssm_multipliers: tuple[float, float, float, float, float] | None = None
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0


def falcon_h1(d: FalconH1) -> DecoderSpec:
    """Describe Falcon-H1: attention and Mamba-2 side by side in every layer, with many factors.

    Falcon-LLM team, 2025, arXiv:2507.22448. Without biases, a factor on the inputs of a projection
    is one on its outputs.
    """
    if d.attention_bias and d.attention_in_multiplier != 1.0:
        raise UnsupportedModelError("attention_bias with attention_in_multiplier is not supported")
    if d.mamba_proj_bias and d.ssm_in_multiplier != 1.0:
        raise UnsupportedModelError("mamba_proj_bias with ssm_in_multiplier is not supported")
    if d.mamba_proj_bias != d.projectors_bias:
        raise UnsupportedModelError("mamba_proj_bias and projectors_bias must be the same")
    inputs, (gate, down) = d.attention_in_multiplier, d.mlp_multipliers or (1.0, 1.0)
    norm = "before_gate" if d.mamba_norm_before_gate else "after_gate"
    mamba = _mamba2(
        d,
        d.mamba_expand * d.hidden_size if d.mamba_d_ssm is None else d.mamba_d_ssm,
        norm=norm if d.mamba_rms_norm else None,
        scales=tuple(d.ssm_in_multiplier * scale for scale in d.ssm_multipliers or (1.0,) * 5),
    )
    decoder = spec(
        d,
        attention={"scale": d.head_size**-0.5 * inputs * inputs * d.key_multiplier},
        mlp={"gate_scale": gate},
        layer={"output_scales": (inputs * d.attention_out_multiplier, d.ssm_out_multiplier, down)},
        embedding_scale=d.embedding_multiplier,
        logit_scale=d.lm_head_multiplier,
    )
    return _changed(decoder, [{"recurrence": mamba}] * decoder.num_layers)


class NemotronH(MambaSteps, DeepseekExperts):
    """Kinds of layers are a list, or a letter each."""

    layers_block_type: list[str] | None = None
    layer_types: list[str] | None = None
    hybrid_override_pattern: str = ""
    mlp_hidden_act: str = "relu2"
    layer_norm_epsilon: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    use_bias: bool = False
    mamba_num_heads: int = 128
    mamba_head_dim: int = 64
    mamba_hidden_act: str = "silu"
    ssm_state_size: int = 128
    n_groups: int = 8
    conv_kernel: int = 4
    use_conv_bias: bool = True
    moe_shared_expert_intermediate_size: int = 0
    moe_latent_size: int | None = None


def nemotron_h(d: NemotronH) -> DecoderSpec:
    """Describe Nemotron-H and Nemotron 3: a layer is Mamba-2, attention, an MLP or experts alone.

    NVIDIA, 2025, arXiv:2504.03624 and arXiv:2512.20848. There are no positions. The experts have
    no gates; their router is that of DeepSeek-V3. Steps of Mamba-2 have the
    limits of `time_step_limit`. transformers also limits the steps of prompts, but not those of
    single tokens, by `time_step_min`, from which training only draws the first weights.
    """
    kinds = d.layers_block_type or d.layer_types or list(d.hybrid_override_pattern)
    if len(kinds) > MAX_LAYERS:
        raise UnsupportedModelError(f"{len(kinds)} layers are not supported")
    kinds = [_NEMOTRON_KINDS.get(kind, kind) for kind in kinds]
    d = d.replace(num_hidden_layers=len(kinds))
    check_kinds(d, kinds, {_LINEAR, FULL, "mlp", "moe"})
    if d.mamba_hidden_act != "silu":
        raise UnsupportedModelError(f"mamba_hidden_act is {d.mamba_hidden_act!r}, not 'silu'")
    if d.mlp_bias and "moe" in kinds:
        raise UnsupportedModelError("mlp_bias with experts is not supported")
    mamba = Mamba2Spec(
        num_heads=d.mamba_num_heads,
        num_groups=d.n_groups,
        head_dim=d.mamba_head_dim,
        state_size=d.ssm_state_size,
        kernel_size=d.conv_kernel,
        has_conv_bias=d.use_conv_bias,
        has_bias=d.use_bias,
        **_step_limits(d),
    )
    decoder = spec(
        d,
        ropes=(no_rope(d.head_size),),
        mlp={"is_gated": False},
    )
    decoder = with_deepseek_experts(
        d,
        decoder,
        sparse=[kind == "moe" for kind in kinds],
        is_gated=False,
        shared_size=d.moe_shared_expert_intermediate_size,
        latent_size=d.moe_latent_size,
        **deepseek_v3_router(d),
    )
    networks: dict[str, dict[str, Any]] = {
        _LINEAR: {"attention": None, "recurrence": mamba, "mlp": None},
        FULL: {"mlp": None},
        "mlp": {"attention": None},
        "moe": {"attention": None},
    }
    return _changed(decoder, [networks[kind] for kind in kinds])


class Lfm2(Rotary):
    hidden_act: str = "silu"
    norm_eps: float = 1e-5
    layer_types: list[str] | None = None
    full_attn_idxs: list[int] | None = None
    conv_L_cache: int = 3  # noqa: N815 (the file's spelling)
    conv_bias: bool = False
    block_ff_dim: int | None = None
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: float | None = 1.0
    block_multiple_of: int = 256
    tie_embedding: bool | None = None


def lfm2(d: Lfm2) -> DecoderSpec:
    """Describe LFM2: gated short convolutions, with attention in some layers.

    Liquid AI, 2025, arXiv:2511.23404.
    """
    kinds = d.layer_types
    if kinds is None:
        full = range(d.num_hidden_layers) if d.full_attn_idxs is None else d.full_attn_idxs
        kinds = [FULL if i in full else "conv" for i in range(d.num_hidden_layers)]
    check_kinds(d, kinds, {FULL, "conv"})
    size = d.spelled("mlp_size")
    if d.block_auto_adjust_ff_dim:
        size = int(2 * size / 3)
        if d.block_ffn_dim_multiplier is not None:
            size = int(d.block_ffn_dim_multiplier * size)
        size = -(-size // d.block_multiple_of) * d.block_multiple_of
    return spec(
        d,
        recurrence=ShortConvSpec(
            num_channels=d.hidden_size, kernel_size=d.conv_L_cache, has_bias=d.conv_bias
        ),
        has_attention=[kind == FULL for kind in kinds],
        attention={"qk_norm": "head"},
        mlp={"size": size},
    )


class Lfm2Moe(Lfm2, ExpertKeys):
    num_dense_layers: int = 0
    use_expert_bias: bool = True
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0


def lfm2_moe(d: Lfm2Moe) -> DecoderSpec:
    """Describe LFM2's mixtures: LFM2 with experts after the first layers.

    transformers adds 1e-6 to the sum by which it divides a token's weights, which is about 1.
    """
    return with_experts(
        d,
        lfm2(d),
        sparse=[layer >= d.num_dense_layers for layer in range(d.num_hidden_layers)],
        score="sigmoid",
        has_selection_bias=d.use_expert_bias,
        is_normalized=d.norm_topk_prob,
        factor=d.routed_scaling_factor,
    )


class Qwen35(Biased):
    layer_types: list[str] | None = None
    full_attention_interval: int = 4
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32


def qwen3_5(d: Qwen35) -> DecoderSpec:
    """Describe Qwen3.5: gated delta nets, and gated attention in every fourth layer.

    Without the vision model, and the predictors of further tokens.
    """
    kinds = d.layer_types or [
        FULL if (i + 1) % d.full_attention_interval == 0 else _LINEAR
        for i in range(d.num_hidden_layers)
    ]
    check_kinds(d, kinds, {FULL, _LINEAR})
    return spec(
        d,
        recurrence=DeltaNetSpec(
            num_heads=d.linear_num_value_heads,
            num_key_heads=d.linear_num_key_heads,
            key_dim=d.linear_key_head_dim,
            value_dim=d.linear_value_head_dim,
            kernel_size=d.linear_conv_kernel_dim,
        ),
        has_attention=[kind == FULL for kind in kinds],
        attention={"qk_norm": "head", "has_gate": True},
    )


class Qwen35Moe(Qwen35, ExpertKeys):
    shared_expert_intermediate_size: int = 0


def qwen3_5_moe(d: Qwen35Moe) -> DecoderSpec:
    """Describe Qwen3.5's and 3.6's mixtures: Qwen3.5 with experts in all layers."""
    return with_experts(
        d, qwen3_5(d), shared_size=d.shared_expert_intermediate_size, has_shared_gate=True
    )


class Qwen3Next(Qwen35Moe, SparseSteps):
    norm_topk_prob: bool = False


def qwen3_next(d: Qwen3Next) -> DecoderSpec:
    """Describe Qwen3-Next: Qwen3.5 with experts in most layers, and other projections."""
    return with_experts(
        d,
        qwen3_5(d),
        sparse=sparse_steps(d),
        is_normalized=d.norm_topk_prob,
        shared_size=d.shared_expert_intermediate_size,
        has_shared_gate=True,
    )


def _mamba2(d: Mamba, size: int, **own: Any) -> Mamba2Spec:
    """Return Mamba-2 of Granite and Falcon.

    Args:
        size: inputs of the heads, all together.
        own: further fields of the record.
    """
    head_dim = d.mamba_d_head if isinstance(d.mamba_d_head, int) else size // d.mamba_n_heads
    if head_dim * d.mamba_n_heads != size:
        raise UnsupportedModelError(
            f"{d.mamba_n_heads} heads of {head_dim} are not inputs of {size}"
        )
    return Mamba2Spec(
        num_heads=d.mamba_n_heads,
        num_groups=d.mamba_n_groups,
        head_dim=head_dim,
        state_size=d.mamba_d_state,
        kernel_size=d.mamba_d_conv,
        has_conv_bias=d.mamba_conv_bias,
        has_bias=d.mamba_proj_bias,
        **_step_limits(d),
        **own,
    )


def _step_limits(d: MambaSteps) -> dict[str, Any]:
    """Return the limits of Mamba-2's steps."""
    shortest, longest = (
        float(limit["__float__"] if isinstance(limit, dict) else limit)
        for limit in d.time_step_limit or (0.0, math.inf)
    )
    return {
        "shortest_step": shortest,
        "longest_step": None if longest == math.inf else longest,
    }


def _changed(spec: DecoderSpec, layers: Sequence[dict[str, Any]]) -> DecoderSpec:
    """Change fields of each layer."""
    changed = (
        msgspec.structs.replace(layer, **fields)
        for layer, fields in zip(spec.layers, layers, strict=True)
    )
    return msgspec.structs.replace(spec, layers=tuple(changed))
