"""Families with multi-head latent attention (`legato.model.latent`), most with experts as well."""

from typing import Any

from msgspec.structs import replace

from legato.core.errors import UnsupportedModelError
from legato.model.description import Biased
from legato.model.expert_families import (
    DeepseekExperts,
    ListedMlps,
    deepseek_v3_router,
    listed_sparse,
    router_groups,
    with_deepseek_experts,
)
from legato.model.latent import LatentAttentionSpec
from legato.model.rope import rope_frequencies, temperature
from legato.model.spec import DecoderSpec
from legato.model.spec_builder import spec


class Latent(Biased):
    """The keys of latent attention. Without q_lora_rank, queries have no latent."""

    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int | None = None


class DeepseekV3(Latent, DeepseekExperts): ...


class DeepseekV2(DeepseekV3):
    topk_method: str | None = None
    scoring_func: str | None = None


def deepseek_v2(d: DeepseekV2) -> DecoderSpec:
    """Describe DeepSeek-V2 and Lite: experts by softmax, perhaps of the groups with the best one.

    DeepSeek-AI, 2024, arXiv:2405.04434.
    """
    groups: dict[str, Any] = {}
    if d.topk_method == "group_limited_greedy":
        groups = {**router_groups(d), "group_scores": 1}
    elif d.topk_method != "greedy":
        raise UnsupportedModelError(f"unsupported topk_method {d.topk_method!r}")
    if d.scoring_func not in (None, "softmax"):
        raise UnsupportedModelError(f"unsupported scoring_func {d.scoring_func!r}")
    if d.norm_topk_prob:
        raise UnsupportedModelError("norm_topk_prob is not supported for DeepSeek-V2")
    return with_deepseek_experts(d, _latent(d), is_normalized=False, **groups)


def deepseek_v3(d: DeepseekV3) -> DecoderSpec:
    """Describe DeepSeek-V3, R1 and Kimi K2: experts by sigmoid, a bias and the best groups.

    DeepSeek-AI, 2024, arXiv:2412.19437; Kimi team, 2025, arXiv:2507.20534.
    """
    return with_deepseek_experts(d, _latent(d), **deepseek_v3_router(d))


class Glm4MoeLite(DeepseekV3, ListedMlps): ...


def glm4_moe_lite(d: Glm4MoeLite) -> DecoderSpec:
    """Describe GLM-4.7-Flash: DeepSeek-V3 with a list of the layers that have experts."""
    sparse = listed_sparse(d)
    return with_deepseek_experts(d, _latent(d), sparse=sparse, **deepseek_v3_router(d))


class Indexed(Glm4MoeLite):
    index_topk: int = 2048


def indexed(d: Indexed) -> DecoderSpec:
    """Describe DeepSeek-V3.2 and GLM-5 without their indexer, as long as it chooses all tokens.

    DeepSeek-AI, 2025, arXiv:2512.02556: it chooses `index_topk` tokens to attend to. Up to so many,
    the layers are those of DeepSeek-V3.
    """
    whole = glm4_moe_lite(d)
    return replace(whole, max_model_len=min(whole.max_model_len, d.index_topk))


def mistral4(d: DeepseekV3) -> DecoderSpec:
    """Describe Mistral Small 4: experts by softmax, and queries that grow with their position."""
    # Its partial_rotary_factor is the share of the rotated part, which always rotates as a whole.
    rope = {name: value for name, value in d.rope.items() if name != "partial_rotary_factor"}
    return with_deepseek_experts(d, _latent(d, rope), **router_groups(d))


def youtu(d: Latent) -> DecoderSpec:
    """Describe Youtu-LLM: DeepSeek-V3 without experts."""
    return _latent(d)


class MiniCPM3(Latent):
    mlp_bias: bool = False
    scale_emb: float = 1.0
    scale_depth: float | None = None
    dim_model_base: int | None = None


def minicpm3(d: MiniCPM3) -> DecoderSpec:
    """Describe MiniCPM3: latent attention, and factors on embeddings, residuals and logits."""
    num_layers = d.num_hidden_layers
    depth = num_layers**0.5 if d.scale_depth is None else d.scale_depth
    base = d.hidden_size if d.dim_model_base is None else d.dim_model_base
    return _latent(
        d,
        layer={"residual_scale": depth / num_layers**0.5},
        embedding_scale=d.scale_emb,
        logit_scale=base / d.hidden_size,
    )


def _latent(d: Latent, rope: dict[str, Any] | None = None, **fields: Any) -> DecoderSpec:
    """Describe a decoder with latent attention and MLPs.

    Args:
        rope: its parameters; None for the description's.
        fields: further arguments of `spec`.
    """
    parameters = d.rope if rope is None else rope
    latent = LatentAttentionSpec(
        q_rank=d.q_lora_rank,
        kv_rank=d.kv_lora_rank,
        nope_dim=d.qk_nope_head_dim,
        rope_dim=d.qk_rope_head_dim,
        value_dim=d.v_head_dim or d.hidden_size // d.num_attention_heads,
        has_bias=d.attention_bias,
    )
    frequencies = rope_frequencies(
        parameters, latent.rope_dim, d.max_position_embeddings, d.served_len
    )
    attention = {
        "num_kv_heads": 1,
        "head_dim": latent.key_dim,
        "scale": latent.query_dim**-0.5 * _growth(parameters),
        "qkv_bias": False,
        "latent": latent,
    }
    return spec(d, ropes=(frequencies,), attention=attention, **fields)


def _growth(parameters: dict[str, Any]) -> float:
    """Return the factor on scores, which is YaRN's temperature of queries and of keys."""
    scale = parameters.get("mscale_all_dim")
    if parameters["rope_type"] == "default" or not scale:
        return 1.0
    return temperature(parameters["factor"], scale) ** 2
