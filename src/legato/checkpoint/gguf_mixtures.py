"""The GGUF architectures with experts or latents, beyond those of `gguf_architectures`."""

from typing import Any

import torch

from legato.checkpoint.gguf_architectures import (
    ARCHITECTURES,
    EXPERT_NAMES,
    SHARED_GATES,
    GGUFArchitecture,
    common_config,
    expert_config,
    expert_splits,
    layer_counts,
    shared_size,
    without_predictors,
)
from legato.checkpoint.gguf_dense import (
    has_tensor,
    named,
    split_parts,
    yarn_with_growth,
)
from legato.checkpoint.gguf_file import GGUFFile
from legato.core.errors import UnsupportedModelError
from legato.model.description import FULL
from legato.model.quantization import plain
from legato.model.spec import DecoderSpec
from legato.model.transforms import Named, Transform, Weight

_SOFTMAX, _SIGMOID = 1, 2  # an `expert_gating_func`
_LLAMA4_CHUNK, _MAVERICK_EXPERTS = 8192, 128


def _qwen2_moe_config(file: GGUFFile) -> dict[str, Any]:
    """Describe Qwen1.5-MoE and Qwen2's mixture; the format does not say norm_topk_prob."""
    return {
        **named("Qwen2MoeForCausalLM", qkv_bias="attn_q.bias")(file),
        **expert_config(file),
        "shared_expert_intermediate_size": shared_size(file),
        "norm_topk_prob": False,
    }


def _olmoe_config(file: GGUFFile) -> dict[str, Any]:
    """Describe OLMoE; its experts have the width of MLPs."""
    contents = named("OlmoeForCausalLM", attention_bias="attn_q.bias")(file)
    return {**contents, **_only_experts(file), "norm_topk_prob": False}


def _minimax_m2_config(file: GGUFFile) -> dict[str, Any]:
    contents = named("MiniMaxM2ForCausalLM", attention_bias="attn_q.bias")(file)
    return {**contents, **_only_experts(file)}


def _only_experts(file: GGUFFile) -> dict[str, Any]:
    """Return the keys of experts in families without MLPs, whose width is then the experts'."""
    contents = expert_config(file)
    size = contents.pop("moe_intermediate_size")
    return contents | ({} if size is None else {"intermediate_size": size})


def _hunyuan_moe_config(file: GGUFFile) -> dict[str, Any]:
    """Describe Hunyuan's mixtures; the MLP for all tokens has the width of MLPs."""
    contents = named("HunYuanMoEV1ForCausalLM", attention_bias="attn_q.bias")(file)
    return {**contents, **expert_config(file), "intermediate_size": shared_size(file)}


def _ernie_moe_config(file: GGUFFile) -> dict[str, Any]:
    contents = {
        **named("Ernie4_5_MoeForCausalLM", use_bias="attn_q.bias")(file),
        **expert_config(file),
    }
    return contents | {
        "moe_k": contents.pop("num_experts_per_tok"),
        "moe_num_shared_experts": _num_shared(file, contents["moe_intermediate_size"]),
        "moe_layer_start_index": file.get("leading_dense_block_count", 0),
        "moe_layer_interval": file.get("interleave_moe_layer_step", 1),
    }


def _num_shared(file: GGUFFile, size: int) -> int:
    """Return the number of experts for all tokens, which are one MLP in the file."""
    width = shared_size(file)
    if width % size:
        raise UnsupportedModelError(
            f"{file.path}: the expert for all tokens has width {width}, the others {size}"
        )
    return width // size


def _deepseek_experts(file: GGUFFile) -> dict[str, Any]:
    """Return the keys of DeepSeek's experts, and of the layers that have them."""
    contents = expert_config(file)
    return {
        **contents,
        **layer_counts(file),
        "n_shared_experts": _num_shared(file, contents["moe_intermediate_size"]),
        "norm_topk_prob": bool(file.get("expert_weights_norm", False)),
        "routed_scaling_factor": file.get("expert_weights_scale") or 1.0,
        "first_k_dense_replace": file.get("leading_dense_block_count", 0),
        "n_group": file.get("expert_group_count") or 1,
        "topk_group": file.get("expert_group_used_count") or 1,
    }


def _glm4_moe_config(file: GGUFFile) -> dict[str, Any]:
    """Describe GLM-4.5, or a model with the same layers: dots.llm1, Ling 2 and Ring 2."""
    return {
        **named(
            "Glm4MoeForCausalLM", attention_bias="attn_q.bias", use_qk_norm="attn_q_norm.weight"
        )(file),
        **_deepseek_experts(file),
    }


def _deepseek_config(file: GGUFFile) -> dict[str, Any]:
    """Describe a model of DeepSeek's kind: all are named "deepseek2".

    Without experts it is Youtu-LLM. A sigmoid makes it DeepSeek-V3, R1, Kimi K2 or GLM-4.7-Flash,
    which old files tell by the biases of selection. A softmax makes it DeepSeek-V2, or, if the
    weights are then normalized, Mistral.
    """
    contents = {**_latent_config(file), **layer_counts(file)}
    score = file.get("expert_gating_func", _SOFTMAX)
    if any(name.endswith("exp_probs_b.bias") for name in file.tensors):
        score = _SIGMOID
    if score not in (_SOFTMAX, _SIGMOID):
        raise UnsupportedModelError(f"{file.path}: expert_gating_func is {score}, not 1 or 2")
    if not file.get("expert_count"):
        _refuse_experts(file, contents["num_hidden_layers"])
        return {**contents, "architectures": ["YoutuForCausalLM"]}
    contents |= _deepseek_experts(file)
    if score == _SIGMOID:
        return {**contents, "architectures": ["DeepseekV3ForCausalLM"]}
    if contents["norm_topk_prob"]:
        return {**contents, "architectures": ["Mistral4ForCausalLM"]}
    method = "group_limited_greedy" if contents["n_group"] > 1 else "greedy"
    return {**contents, "architectures": ["DeepseekV2ForCausalLM"], "topk_method": method}


def _refuse_experts(file: GGUFFile, num_layers: int) -> None:
    """Refuse layers with experts in a file without any."""
    size = file.get("expert_feed_forward_length")
    if file.get("leading_dense_block_count", num_layers) < num_layers:
        raise UnsupportedModelError(
            f"{file.path}: expert_count is 0, but layers have experts of width {size}"
        )


def _llama4_config(file: GGUFFile) -> dict[str, Any]:
    """Describe Llama 4; the file has no more of its chunks than that there are none, by a width 0.

    As in llama.cpp, only models of 128 experts do not normalize queries and keys.
    """
    chunk = file.get("attention.sliding_window", _LLAMA4_CHUNK)
    contents = {
        **named("Llama4ForCausalLM", attention_bias="attn_q.bias")(file),
        "num_local_experts": file.get("expert_count", 0),
        "num_experts_per_tok": file.get("expert_used_count", 0),
        "attention_chunk_size": _LLAMA4_CHUNK,
        "no_rope_layer_interval": 4 if chunk else 0,
        "interleave_moe_layer_step": file.needed("interleave_moe_layer_step"),
        "use_qk_norm": file.get("expert_count", 0) != _MAVERICK_EXPERTS,
    }
    dense_size = contents["intermediate_size"]
    return contents | {
        "intermediate_size": file.needed("expert_feed_forward_length"),
        "intermediate_size_mlp": dense_size,
        "layer_types": None if chunk else [FULL] * contents["num_hidden_layers"],
    }


def _mistral4_config(file: GGUFFile) -> dict[str, Any]:
    return {
        **_latent_config(file),
        **_deepseek_experts(file),
        "architectures": ["Mistral4ForCausalLM"],
    }


def _latent_config(file: GGUFFile) -> dict[str, Any]:
    """Return the keys of families with latent attention.

    Older files have the size of a head's key and value where newer ones have those of the latents.
    """
    rope_dim = file.needed("rope.dimension_count")
    contents = common_config(file, rope_dim)
    key_dim, value_dim = file.get("attention.key_length"), file.get("attention.value_length")
    rope = yarn_with_growth(file, contents["rope_parameters"], 0.1)
    if "mscale_all_dim" in rope:
        rope["mscale"] = rope["mscale_all_dim"]
    return {
        **contents,
        "rope_parameters": rope,
        "attention_bias": has_tensor(file, "attn_q_a.bias"),
        "q_lora_rank": file.get("attention.q_lora_rank"),
        "kv_lora_rank": file.needed("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": file.get("attention.key_length_mla", key_dim) - rope_dim,
        "v_head_dim": file.get("attention.value_length_mla", value_dim),
    }


def _minicpm3_config(file: GGUFFile) -> dict[str, Any]:
    """Describe MiniCPM3; the file has neither its factors nor the size of a value."""
    contents = _latent_config(file)
    rows = file.tensors["blk.0.attn_kv_b.weight"].shape[0]
    size = rows // contents["num_attention_heads"] - contents["qk_nope_head_dim"]
    return {**contents, "architectures": ["MiniCPM3ForCausalLM"], "v_head_dim": size}


def _joined_heads(file: GGUFFile, spec: DecoderSpec) -> list[Transform]:
    """Join the projections to keys and to values; older files have them joined.

    Those to keys are transposed, [H, R, nope_dim] and [H, value_dim, R].
    """
    own = spec.attentions[0]
    latent = own.latent
    assert latent is not None
    shape = own.num_heads, -1, latent.kv_rank
    waiting: dict[str, dict[str, torch.Tensor]] = {}

    def apply(name: str, weight: Weight) -> list[Named]:
        parent, _, part = name.rpartition(".self_attn.")
        if part not in ("k_b_proj.weight", "v_b_proj.weight"):
            return [(name, weight)]
        heads = plain(weight)
        if part.startswith("k"):
            heads = heads.reshape(own.num_heads, latent.kv_rank, -1).mT
        parts = waiting.setdefault(parent, {})
        parts[part[0]] = heads.reshape(shape)
        if len(parts) == 1:
            return []
        del waiting[parent]
        joined = torch.cat((parts["k"], parts["v"]), dim=1).flatten(0, 1)
        return [(f"{parent}.self_attn.kv_b_proj.weight", joined)]

    return [*without_predictors(file, spec), apply]


_LATENT_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}

MIXTURES = {
    "qwen2moe": GGUFArchitecture(_qwen2_moe_config, EXPERT_NAMES, lambda *_: [SHARED_GATES]),
    "qwen3vlmoe": ARCHITECTURES["qwen3moe"],
    "olmoe": GGUFArchitecture(_olmoe_config, EXPERT_NAMES),
    "minimax-m2": GGUFArchitecture(
        _minimax_m2_config, EXPERT_NAMES, implied={"expert_gating_func": (_SIGMOID,)}
    ),
    "hunyuan-moe": GGUFArchitecture(_hunyuan_moe_config, EXPERT_NAMES),
    "ernie4_5-moe": GGUFArchitecture(
        _ernie_moe_config, EXPERT_NAMES, implied={"expert_gating_func": (_SOFTMAX,)}
    ),
    "glm4moe": GGUFArchitecture(
        _glm4_moe_config,
        EXPERT_NAMES | {"post_attention_norm": "post_attention_layernorm"},
        without_predictors,
        implied={"expert_gating_func": (_SIGMOID,)},
    ),
    "dots1": GGUFArchitecture(
        _glm4_moe_config, EXPERT_NAMES, implied={"expert_gating_func": (_SIGMOID,)}
    ),
    "bailingmoe2": GGUFArchitecture(
        _glm4_moe_config,
        EXPERT_NAMES | {"attn_qkv": "self_attn.parts"},
        lambda *own: [*without_predictors(*own), *split_parts(*own)],
        implied={"expert_gating_func": (_SIGMOID,)},
    ),
    "llama4": GGUFArchitecture(_llama4_config, EXPERT_NAMES, expert_splits),
    "deepseek2": GGUFArchitecture(_deepseek_config, EXPERT_NAMES | _LATENT_NAMES, _joined_heads),
    "mistral4": GGUFArchitecture(
        _mistral4_config,
        EXPERT_NAMES | _LATENT_NAMES,
        _joined_heads,
        implied={"expert_gating_func": (_SOFTMAX,)},
    ),
    "minicpm3": GGUFArchitecture(_minicpm3_config, _LATENT_NAMES),
}
"""Key `general.architecture`."""
