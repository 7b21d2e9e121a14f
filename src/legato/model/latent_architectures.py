"""The supported architectures with multi-head latent attention."""

from typing import Any

from legato.model import latent_families as families
from legato.model.architecture import Architecture, mistral_yarn
from legato.model.expert_architectures import DEEPSEEK_NAMES

_V3_IMPLIED = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
_V3 = {
    "max_position_embeddings": 163_840,
    "q_lora_rank": 1536,
    "v_head_dim": 128,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
}
_INDEXER = tuple(
    f".indexer.{name}"
    for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
)
"""Ends of the names of the tensors that choose the tokens to attend to."""
_INDEXER_IMPLIED: dict[str, tuple[Any, ...]] = dict.fromkeys(
    (
        *("index_head_dim", "index_n_heads", "index_topk_freq", "index_topk_pattern"),
        *("index_skip_topk_offset", "indexer_types", "layer_types", "indexer_rope_interleave"),
    ),
    (),
)
"""They say which tokens are chosen; of few tokens, all are."""

LATENT_ARCHITECTURES = {
    "DeepseekV2ForCausalLM": Architecture(
        "deepseek_v2",
        families.deepseek_v2,
        {
            "max_position_embeddings": 2048,
            "q_lora_rank": 1536,
            "v_head_dim": 128,
            "topk_method": "greedy",
            "num_local_experts": 64,
            "moe_intermediate_size": 1407,
            "n_shared_experts": 2,
        },
        names=DEEPSEEK_NAMES,
        is_interleaved=True,
    ),
    "DeepseekV3ForCausalLM": Architecture(
        "deepseek_v3",
        families.deepseek_v3,
        _V3 | {"max_position_embeddings": 4096},
        names=DEEPSEEK_NAMES,
        is_interleaved=True,
        other_types=("kimi_k2",),
        implied=_V3_IMPLIED,
    ),
    "Glm4MoeLiteForCausalLM": Architecture(
        "glm4_moe_lite",
        families.glm4_moe_lite,
        {
            "max_position_embeddings": 202_752,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "num_local_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "first_k_dense_replace": 1,
        },
        names=DEEPSEEK_NAMES,
        is_interleaved=True,
        implied=_V3_IMPLIED,
    ),
    "DeepseekV32ForCausalLM": Architecture(
        "deepseek_v32",
        families.indexed,
        _V3,
        names=DEEPSEEK_NAMES,
        is_interleaved=True,
        unused=_INDEXER,
        implied=_V3_IMPLIED | _INDEXER_IMPLIED,
    ),
    "GlmMoeDsaForCausalLM": Architecture(
        "glm_moe_dsa",
        families.indexed,
        _V3
        | {
            "max_position_embeddings": 202_752,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_group": 1,
            "topk_group": 1,
        },
        names=DEEPSEEK_NAMES,
        is_interleaved=True,
        unused=_INDEXER,
        implied=_V3_IMPLIED | _INDEXER_IMPLIED,
    ),
    "Mistral4ForCausalLM": Architecture(
        "mistral4",
        families.mistral4,
        {
            "max_position_embeddings": 2**20,
            "q_lora_rank": 1024,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "v_head_dim": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 2048,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "rope_parameters": mistral_yarn(10000.0, 128.0, 8192),
        },
        names=DEEPSEEK_NAMES,
        is_interleaved=True,
    ),
    "YoutuForCausalLM": Architecture(
        "youtu",
        families.youtu,
        {
            "max_position_embeddings": 2**17,
            "q_lora_rank": 1536,
            "v_head_dim": 128,
            "tie_word_embeddings": True,
        },
        is_interleaved=True,
    ),
    "MiniCPM3ForCausalLM": Architecture(
        "minicpm3",
        families.minicpm3,
        {
            "max_position_embeddings": 2**15,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "q_lora_rank": 768,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "scale_emb": 12.0,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
    ),
}
"""Key a name in a configuration's `architectures`."""
