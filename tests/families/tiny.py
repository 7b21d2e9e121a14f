"""Tiny random checkpoints of every family, made with transformers."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Mistral4ForCausalLM, PreTrainedModel

from tests.families.tiny_config import FULL, SLIDING, VOCAB_SIZE, WINDOW, Tiny
from tests.families.tiny_recurrent import RECURRENT_MODELS

_EXPERTS = {"num_hidden_layers": 3}


def _yarn(**more: Any) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        **more,
    }


def _without(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != name}


def _longrope(num_pairs: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(num_pairs)],
        "long_factor": [2.0 + 0.3 * i for i in range(num_pairs)],
        "original_max_position_embeddings": 64,
    }


_LATENT = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
}
_ROUTED = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
_INDEXER = {"index_topk": 512, "index_head_dim": 32, "index_n_heads": 2}
"""Of DeepSeek-V3.2; it chooses all tokens of a short text."""
_GEMMA4 = {
    "head_dim": 32,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "layer_types": [SLIDING, FULL] * 2,
    "sliding_window": WINDOW,
    "final_logit_softcapping": 3.0,
}


MODELS = {
    "llama": Tiny("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-dynamic": Tiny(
        "llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}}
    ),
    "mistral": Tiny("mistral", {"sliding_window": WINDOW}),
    "qwen2": Tiny(
        "qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
    ),
    "qwen3": Tiny("qwen3", {"head_dim": 64, "tie_word_embeddings": True}),
    "phi3": Tiny("phi3", {"sliding_window": WINDOW}),
    "phi4-mini": Tiny(
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 64,
            "rope_parameters": {**_longrope(12), "partial_rotary_factor": 0.75},
            "tie_word_embeddings": True,
        },
    ),
    "granite": Tiny(
        "granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "attention_bias": True,
        },
    ),
    "granite-4": Tiny(
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 96,
            "layer_types": ["attention"] * 4,
            "position_embedding_type": "rope",
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "granite-4-nope": Tiny(
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 96,
            "layer_types": ["attention"] * 4,
        },
    ),
    "smollm3": Tiny("smollm3"),
    "olmo2": Tiny("olmo2"),
    "olmo3": Tiny(
        "olmo3",
        {
            "sliding_window": WINDOW,
            "rope_parameters": {
                FULL: _yarn(),
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "exaone4": Tiny("exaone4", {"sliding_window": WINDOW}),
    "exaone4-small": Tiny("exaone4", {"sliding_window": None, "layer_types": [FULL] * 4}),
    "glm4": Tiny("glm4", {"head_dim": 64}),
    "seed-oss": Tiny("seed_oss", {"head_dim": 64}),
    "ernie4.5": Tiny("ernie4_5", {"head_dim": 64, "use_bias": True}),
    "hunyuan": Tiny(
        "hunyuan_v1_dense",
        {
            "head_dim": 64,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "factor": 1.0,
                "alpha": 1000.0,
            },
        },
    ),
    "ministral3": Tiny(
        "ministral3",
        {
            "head_dim": 64,
            "rope_parameters": _yarn(
                llama_4_scaling_beta=0.3, mscale=1.0, mscale_all_dim=1.0, beta_fast=32.0
            ),
        },
    ),
    "gemma2": Tiny(
        "gemma2",
        {
            "head_dim": 64,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3": Tiny(
        "gemma3_text",
        {
            "head_dim": 64,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma4-e2b": Tiny(
        "gemma4_text",
        {
            "num_hidden_layers": 6,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "global_head_dim": 64,
            "layer_types": [SLIDING, SLIDING, FULL] * 2,
            "sliding_window": WINDOW,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4-12b": Tiny("gemma4_unified_text", _GEMMA4),
    "gemma4-31b": Tiny("gemma4_text", {**_GEMMA4, "hidden_size_per_layer_input": 0}),
    "gemma4-26b-a4b": Tiny(
        "gemma4_text",
        {
            **_GEMMA4,
            **_EXPERTS,
            "hidden_size_per_layer_input": 0,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "layer_types": [SLIDING, SLIDING, FULL],
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 64,
        },
    ),
    "cohere2": Tiny("cohere2", {"sliding_window": WINDOW, "logit_scale": 0.25}),
    "starcoder2": Tiny("starcoder2", {"sliding_window": WINDOW}),
    "gpt-neox": Tiny("gpt_neox"),
    "gpt-neox-sequential": Tiny("gpt_neox", {"use_parallel_residual": False}),
    "apertus": Tiny("apertus"),
    **RECURRENT_MODELS,
    "arcee": Tiny("arcee", {"mlp_bias": True, "attention_bias": True}),
    "mixtral": Tiny("mixtral", {**_EXPERTS, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2-moe": Tiny(
        "qwen2_moe",
        {
            **_EXPERTS,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 96,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
        },
    ),
    "qwen3-moe": Tiny(
        "qwen3_moe",
        {
            **_EXPERTS,
            "head_dim": 64,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "mellum": Tiny(
        "mellum",
        {
            **_EXPERTS,
            "head_dim": 64,
            "sliding_window": WINDOW,
            "layer_types": [SLIDING, FULL, SLIDING],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "rope_parameters": {
                FULL: _yarn(rope_theta=500000.0),
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "hunyuan-v3": Tiny(
        "hy_v3",
        {
            **_EXPERTS,
            "head_dim": 64,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "moe_intermediate_size": 64,
            "router_scaling_factor": 1.5,
        },
    ),
    "olmoe": Tiny("olmoe", {**_EXPERTS, "num_experts": 6, "num_experts_per_tok": 3}),
    "granite-moe": Tiny(
        "granitemoe",
        {
            **_EXPERTS,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "gpt-oss": Tiny(
        "gpt_oss",
        {
            **_EXPERTS,
            "head_dim": 64,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": WINDOW,
            "swiglu_limit": 1.0,
            "rope_parameters": _yarn(truncate=False),
        },
    ),
    "llama4": Tiny(
        "llama4_text",
        {
            "head_dim": 32,
            "intermediate_size_mlp": 160,
            "num_local_experts": 6,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": WINDOW,
            "no_rope_layer_interval": 2,
            "floor_scale": 16,
            "attn_scale": 0.5,
        },
    ),
    "llama4-maverick": Tiny(
        "llama4_text",
        {
            "head_dim": 64,
            "intermediate_size_mlp": 160,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": WINDOW,
            "use_qk_norm": False,
        },
    ),
    "glm4-moe": Tiny(
        "glm4_moe",
        {
            **_EXPERTS,
            "head_dim": 64,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "minimax-m2": Tiny(
        "minimax_m2",
        {
            **_EXPERTS,
            "head_dim": 64,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "ernie4.5-moe": Tiny(
        "ernie4_5_moe",
        {
            **_EXPERTS,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 64,
            "use_bias": False,
        },
    ),
    "hunyuan-moe": Tiny(
        "hunyuan_v1_moe", {**_EXPERTS, "head_dim": 64, "num_experts": 6, "moe_topk": 3}
    ),
    "deepseek-v2": Tiny(
        "deepseek_v2",
        {
            **_LATENT,
            **_ROUTED,
            "topk_method": "group_limited_greedy",
            "rope_parameters": _yarn(mscale=0.707, mscale_all_dim=0.5),
        },
    ),
    "deepseek-v2-lite": Tiny("deepseek_v2", {**_LATENT, **_ROUTED, "q_lora_rank": None}),
    "deepseek-v3": Tiny(
        "deepseek_v3",
        {
            **_LATENT,
            **_ROUTED,
            "rms_norm_eps": 1e-3,
            "rope_parameters": _yarn(mscale=1.0, mscale_all_dim=1.0),
        },
    ),
    "glm4-moe-lite": Tiny(
        "glm4_moe_lite",
        {
            **_LATENT,
            **_without(_ROUTED, "first_k_dense_replace"),
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "attention_bias": True,
            "rope_interleave": False,
        },
    ),
    "deepseek-v3.2": Tiny(
        "deepseek_v32",
        {
            **_LATENT,
            **_ROUTED,
            **_INDEXER,
            "rope_parameters": _yarn(mscale=1.0, mscale_all_dim=1.0),
        },
    ),
    "glm-5": Tiny("glm_moe_dsa", {**_LATENT, **_ROUTED, **_INDEXER}),
    "mistral4": Tiny(
        "mistral4",
        {
            **_LATENT,
            **_ROUTED,
            "rope_parameters": _yarn(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3),
        },
    ),
    "youtu": Tiny("youtu", _LATENT),
    "minicpm3": Tiny(
        "minicpm3", {**_LATENT, "dim_model_base": 32, "rope_parameters": _longrope(8)}
    ),
}

_BY_CLASS = {"mistral4": Mistral4ForCausalLM}
"""Key a model type that transformers makes no causal model of by name, value the model's class."""


def random_model(tiny: Tiny) -> PreTrainedModel:
    """Make a model whose every parameter is random: the usual initialization hides errors."""
    torch.manual_seed(0)
    by_class = _BY_CLASS.get(tiny.model_type)
    make = AutoModelForCausalLM.from_config if by_class is None else by_class._from_config
    return randomize(make(tiny.config(), dtype=torch.float32).eval(), tiny.model_type)


def randomize(model: PreTrainedModel, model_type: str) -> PreTrainedModel:
    """Make every parameter random.

    Args:
        model_type: of its text.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                # Around 1, also where 1 is added to what is stored.
                adds_one = model_type.startswith(("gemma", "qwen3_5", "qwen3_next"))
                is_plain = "linear_attn" in name or model_type.startswith("gemma4")
                middle = 0.0 if adds_one and not is_plain else 1.0
                parameter.normal_(middle, 0.2)
            elif parameter.dim() == 1:
                parameter.normal_(0.3, 0.3)
            else:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.3)
            elif name.endswith("layer_scalar"):
                buffer.normal_(0.8, 0.2)
    return model
