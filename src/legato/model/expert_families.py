"""Families with mixtures of experts: each a dense family whose layers, or most, have experts."""

from collections.abc import Sequence
from typing import Any

import msgspec

from legato.core.errors import UnsupportedModelError
from legato.model import families
from legato.model.description import FULL, SLIDING, Biased, ExpertKeys, RopeKeys, Windowed
from legato.model.mlp_spec import MlpSpec, MoeSpec
from legato.model.spec import DecoderSpec, LayerSpec
from legato.model.spec_builder import check_kinds, rope, spec


class SparseSteps(ExpertKeys):
    """The keys of Qwen's mixtures that say which layers have experts."""

    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None


class DeepseekExperts(ExpertKeys):
    """The keys of DeepSeek's mixtures, which other families have, too."""

    n_routed_experts: int | None = None
    n_shared_experts: int = 0
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    n_group: int | None = 1
    topk_group: int | None = 1


class ListedMlps(ExpertKeys):
    """The key that lists which layers have experts."""

    mlp_layer_types: list[str] | None = None


class Mixtral(families.Mistral, ExpertKeys): ...


def mixtral(d: Mixtral) -> DecoderSpec:
    """Describe Mixtral: Mistral with experts.

    Jiang et al., 2024, arXiv:2401.04088.
    """
    windows = (d.sliding_window,) * d.num_hidden_layers
    return with_experts(d, _changed(families.mistral(d), windows))


class Qwen2Moe(families.Qwen2, SparseSteps):
    norm_topk_prob: bool = False
    qkv_bias: bool = True
    shared_expert_intermediate_size: int = 0


def qwen2_moe(d: Qwen2Moe) -> DecoderSpec:
    """Describe Qwen1.5-MoE: Qwen2 with experts, and an expert with a gate for all tokens.

    Yang et al., 2024, arXiv:2407.10671.
    """
    kinds = d.layer_types or [
        SLIDING if d.use_sliding_window and i % 2 == 0 and i < d.max_window_layers else FULL
        for i in range(d.num_hidden_layers)
    ]
    spec = families.qwen2(d.replace(layer_types=kinds))
    return with_experts(
        d,
        _changed(spec, qkv_bias=d.qkv_bias),
        sparse=sparse_steps(d),
        is_normalized=d.norm_topk_prob,
        shared_size=d.shared_expert_intermediate_size or None,
        has_shared_gate=d.shared_expert_intermediate_size > 0,
    )


class Qwen3Moe(families.Qwen3, SparseSteps):
    norm_topk_prob: bool = False


def qwen3_moe(d: Qwen3Moe) -> DecoderSpec:
    """Describe Qwen3's mixtures: Qwen3 with experts.

    Yang et al., 2025, arXiv:2505.09388.
    """
    windows = (d.sliding_window if d.use_sliding_window else None,) * d.num_hidden_layers
    return with_experts(
        d,
        _changed(families.qwen3(d), windows),
        sparse=sparse_steps(d),
        is_normalized=d.norm_topk_prob,
    )


class Mellum(RopeKeys, Windowed, ListedMlps):
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    norm_topk_prob: bool = True


def mellum(d: Mellum) -> DecoderSpec:
    """Describe Mellum 2: Qwen3's mixtures, with windows and a rope of their own in listed layers.

    JetBrains, 2026.
    """
    kinds = d.kinds(0)
    ropes = rope(d, d.rope_of(FULL, theta=5e5)), rope(d, d.rope_of(SLIDING, theta=1e4))
    dense = spec(
        d,
        windows=d.windows_of(kinds),
        ropes=ropes,
        rope_of_layer=[int(kind == SLIDING) for kind in kinds],
        attention={"qk_norm": "head"},
    )
    return with_experts(d, dense, sparse=listed_sparse(d), is_normalized=d.norm_topk_prob)


class HunyuanV3(families.Llama, ListedMlps):
    num_shared_experts: int = 1
    router_scaling_factor: float = 2.826
    first_k_dense_replace: int = 1


def hunyuan_v3(d: HunyuanV3) -> DecoderSpec:
    """Describe Hunyuan 3: experts by sigmoid after the first layer, and one for all tokens.

    Tencent, 2026. The router is that of DeepSeek-V3 (arXiv:2412.19437) without groups.
    """
    first = d.first_k_dense_replace
    return with_experts(
        d,
        _changed(families.llama(d), qk_norm="head"),
        sparse=listed_sparse(d) or [layer >= first for layer in range(d.num_hidden_layers)],
        score="sigmoid",
        has_selection_bias=True,
        factor=d.router_scaling_factor,
        shared_size=d.expert_size * d.num_shared_experts or None,
    )


class Olmoe(families.Llama, ExpertKeys):
    norm_topk_prob: bool = False
    clip_qkv: float | None = None


def olmoe(d: Olmoe) -> DecoderSpec:
    """Describe OLMoE: Llama with experts, and norms over all heads of queries and keys.

    Muennighoff et al., 2024, arXiv:2409.02060.
    """
    if d.clip_qkv is not None:
        raise UnsupportedModelError(f"clip_qkv is {d.clip_qkv}; clipping is not supported")
    spec = _changed(families.llama(d), qk_norm="whole")
    return with_experts(d, spec, is_normalized=d.norm_topk_prob)


class GraniteMoe(families.Granite, ExpertKeys): ...


def granite_moe(d: GraniteMoe) -> DecoderSpec:
    """Describe Granite 3's mixtures: Granite 3 with experts."""
    return with_experts(d, families.granite(d), score="softmax_of_active")


class GptOss(families.Llama, Windowed, ExpertKeys):
    experts_per_token: int | None = None
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0


def gpt_oss(d: GptOss) -> DecoderSpec:
    """Describe gpt-oss: biases everywhere, sinks, windows in every other layer, limited gates.

    OpenAI, 2025, arXiv:2508.10925.
    """
    types = d.layer_types or [FULL if i % 2 else SLIDING for i in range(d.num_hidden_layers)]
    kinds = d.replace(layer_types=types).kinds(0)
    return with_experts(
        d,
        _changed(families.llama(d), d.windows_of(kinds), has_sinks=True),
        score="softmax_of_active",
        has_router_bias=True,
        has_bias=True,
        gate_limit=d.swiglu_limit,
        gate_slope=d.swiglu_alpha,
    )


class Glm4Moe(families.Llama, DeepseekExperts):
    use_qk_norm: bool = False


def glm4_moe(d: Glm4Moe) -> DecoderSpec:
    """Describe GLM-4.5 and later: experts after the first layers, and rope on half of each head.

    GLM-4.5 team, 2025, arXiv:2508.06471. The router is that of DeepSeek-V3 (arXiv:2412.19437).
    """
    spec = _changed(families.llama(d), output_bias=False, qk_norm="head" if d.use_qk_norm else None)
    return with_deepseek_experts(d, spec, **deepseek_v3_router(d))


class MiniMaxM2(families.Llama, ExpertKeys):
    rotary_dim: int | None = None


def minimax_m2(d: MiniMaxM2) -> DecoderSpec:
    """Describe MiniMax-M2: norms over all heads of queries and keys, rope on a part of each head.

    The router is that of DeepSeek-V3 (arXiv:2412.19437) without groups.
    """
    if d.rotary_dim is not None:
        d = d.replace(partial_rotary_factor=d.rotary_dim / d.head_size)
    spec = _changed(families.llama(d), qk_norm="whole")
    return with_experts(d, spec, score="sigmoid", has_selection_bias=True)


class ErnieMoe(families.Ernie, ExpertKeys):
    moe_num_experts: int | None = None
    moe_k: int | None = None
    moe_num_shared_experts: int = 0
    moe_layer_start_index: int = 0
    moe_layer_end_index: int = -1
    moe_layer_interval: int = 1


def ernie4_5_moe(d: ErnieMoe) -> DecoderSpec:
    """Describe Ernie 4.5's mixtures: Ernie 4.5 with experts in most layers."""
    last = d.moe_layer_end_index if d.moe_layer_end_index >= 0 else d.num_hidden_layers
    interval = d.moe_layer_interval
    return with_experts(
        d,
        families.ernie4_5(d),
        sparse=[
            (layer + 1) % interval == 0 and d.moe_layer_start_index <= layer <= last
            for layer in range(d.num_hidden_layers)
        ],
        has_selection_bias=True,
        shared_size=d.expert_size * d.moe_num_shared_experts or None,
    )


class HunyuanMoe(Biased, ExpertKeys):
    moe_topk: int | list[int] | None = None


def hunyuan_moe(d: HunyuanMoe) -> DecoderSpec:
    """Describe Hunyuan's mixtures: Hunyuan with experts, and an MLP that computes all tokens.

    Tencent, 2024, arXiv:2411.02265.
    """
    return with_experts(d, families.hunyuan(d), shared_size=d.intermediate_size)


def with_deepseek_experts(
    d: DeepseekExperts, spec: DecoderSpec, *, sparse: Sequence[bool] | None = None, **router: Any
) -> DecoderSpec:
    """Put experts, picked or shared, into all layers but the first, as DeepSeek-V2 and V3 do.

    Args:
        sparse: of each layer, whether it has experts; None for what `first_k_dense_replace` says.
        router: fields of `MoeSpec` about the choice of experts.
    """
    first = d.first_k_dense_replace
    fields: dict[str, Any] = {
        "is_normalized": d.norm_topk_prob,
        "factor": d.routed_scaling_factor,
        "shared_size": d.expert_size * d.n_shared_experts or None,
        **router,
    }
    layers = sparse or [layer >= first for layer in range(d.num_hidden_layers)]
    return with_experts(d, spec, sparse=layers, **fields)


def deepseek_v3_router(d: DeepseekExperts) -> dict[str, Any]:
    """Return the fields of `MoeSpec` about the router of DeepSeek-V3 (arXiv:2412.19437)."""
    return {"score": "sigmoid", "has_selection_bias": True, **router_groups(d)}


def router_groups(d: DeepseekExperts) -> dict[str, Any]:
    """Return the fields of `MoeSpec` about groups of experts."""
    return {"num_groups": d.n_group or 1, "num_active_groups": d.topk_group or 1}


def with_experts(
    d: ExpertKeys, spec: DecoderSpec, *, sparse: Sequence[bool] | None = None, **experts: Any
) -> DecoderSpec:
    """Put experts into layers in place of their MLPs.

    Args:
        sparse: of each layer, whether it has experts; None if all have.
        experts: fields of `MoeSpec` that differ from the defaults.

    Raises:
        UnsupportedModelError: layers have different experts, or their MLPs other gates.
    """
    if not d.expert_count:
        return spec
    moe = {"size": d.expert_size, "num_active": d.active_expert_count, **experts}

    def replaced(layer: LayerSpec) -> LayerSpec:
        dense = layer.mlp
        assert isinstance(dense, MlpSpec)
        own = MoeSpec(num_experts=d.expert_count, activation=dense.activation, **moe)
        return msgspec.structs.replace(layer, mlp=own)

    layers = tuple(
        replaced(layer) if is_sparse else layer
        for layer, is_sparse in zip(spec.layers, sparse or (True,) * spec.num_layers, strict=True)
    )
    return msgspec.structs.replace(spec, layers=layers)


def _changed(
    spec: DecoderSpec, windows: Sequence[int | None] | None = None, **attention: Any
) -> DecoderSpec:
    """Change fields of the attention in all layers, and their windows."""
    replace, layers = msgspec.structs.replace, []
    for layer, window in zip(spec.layers, windows or spec.windows, strict=True):
        assert layer.attention is not None
        own = replace(layer.attention, window=window, **attention)
        layers.append(replace(layer, attention=own))
    return replace(spec, layers=tuple(layers))


def sparse_steps(d: SparseSteps) -> list[bool]:
    """Return which layers of a Qwen model have experts."""
    step, dense = d.decoder_sparse_step, d.mlp_only_layers or ()
    return [i not in dense and (i + 1) % step == 0 for i in range(d.num_hidden_layers)]


def listed_sparse(d: ListedMlps) -> list[bool] | None:
    """Return which layers have experts; None if the file has no list of them."""
    kinds = d.mlp_layer_types
    if kinds is None:
        return None
    check_kinds(d, kinds, {"dense", "sparse"})
    return [kind == "sparse" for kind in kinds]
