"""The supported architectures with mixtures of experts."""

from legato.model import expert_families as families
from legato.model.architecture import Architecture

_W_NAMES = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
DEEPSEEK_NAMES = {
    "shared_experts": "shared_expert",
    "e_score_correction_bias": "selection_bias",
}
HUNYUAN_IMPLIED = {
    "add_classification_head": (False,),
    "cla_share_factor": (),
    "norm_type": ("rms",),
    "use_cla": (False,),
    "use_mla": (False,),
    "use_qk_norm": (True,),
    "use_rotary_pos_emb": (True,),
}

EXPERT_ARCHITECTURES = {
    "MixtralForCausalLM": Architecture(
        "mixtral",
        families.mixtral,
        {
            "max_position_embeddings": 2**17,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        names=_W_NAMES,
    ),
    "Qwen2MoeForCausalLM": Architecture(
        "qwen2_moe",
        families.qwen2_moe,
        {
            "max_position_embeddings": 2**15,
            "num_key_value_heads": 16,
            "num_local_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe",
        families.qwen3_moe,
        {
            "max_position_embeddings": 2**15,
            "num_key_value_heads": 4,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
    "OlmoeForCausalLM": Architecture(
        "olmoe",
        families.olmoe,
        {
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 64,
            "num_experts_per_tok": 8,
        },
    ),
    "GraniteMoeForCausalLM": Architecture(
        "granitemoe",
        families.granite_moe,
        {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
        names={
            "block_sparse_moe.router.layer": "mlp.gate",
            "block_sparse_moe.input_linear": "mlp.experts.gate_up_proj",
            "block_sparse_moe.output_linear": "mlp.experts.down_proj",
        },
    ),
    "GptOssForCausalLM": Architecture(
        "gpt_oss",
        families.gpt_oss,
        {
            "max_position_embeddings": 2**17,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "attention_bias": True,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        names={"mlp.router": "mlp.gate"},
        has_transposed_experts=True,
    ),
    "Glm4MoeForCausalLM": Architecture(
        "glm4_moe",
        families.glm4_moe,
        {
            "max_position_embeddings": 2**17,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        names=DEEPSEEK_NAMES,
        has_partial_rope=True,
    ),
    "MiniMaxM2ForCausalLM": Architecture(
        "minimax_m2",
        families.minimax_m2,
        {
            "max_position_embeddings": 196_608,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 5e6,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
        },
        names={
            **_W_NAMES,
            "block_sparse_moe.e_score_correction_bias": "mlp.gate.selection_bias",
        },
        has_partial_rope=True,
        implied={
            "attn_type_list": (1,),
            "qk_norm_type": ("per_layer",),
            "scoring_func": ("sigmoid",),
            "shared_intermediate_size": (0, None),
            "use_qk_norm": (True,),
            "use_routing_bias": (True,),
        },
    ),
    "Ernie4_5_MoeForCausalLM": Architecture(
        "ernie4_5_moe",
        families.ernie4_5_moe,
        {
            "max_position_embeddings": 2**17,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
            "num_local_experts": 64,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
        names={
            **DEEPSEEK_NAMES,
            "mlp.moe_statics.e_score_correction_bias": "mlp.gate.selection_bias",
        },
        is_interleaved=True,
        unused_prefixes=("model.mtp_",),
        implied={
            "moe_gate": ("topk",),
            "moe_norm_min": (1e-12,),
            "moe_use_aux_free": (True,),
            "weight_share_add_bias": (True,),
        },
    ),
    "HunYuanMoEV1ForCausalLM": Architecture(
        "hunyuan_v1_moe",
        families.hunyuan_moe,
        {
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 1,
            "num_experts_per_tok": 1,
        },
        names={
            "query_layernorm": "q_norm",
            "key_layernorm": "k_norm",
            "gate.wg": "gate",
            "shared_mlp": "shared_expert",
        },
        implied={
            **HUNYUAN_IMPLIED,
            "group_limited_greedy": (False,),
            "moe_layer_num_skipped": (0,),
            "norm_topk_prob": (True,),
            "num_shared_expert": (1,),
            "use_mixed_mlp_moe": (True,),
        },
    ),
}
"""Key a name in a configuration's `architectures`."""
