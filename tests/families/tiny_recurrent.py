"""Tiny models with recurrent layers: delta nets, Mamba-2 and short convolutions."""

from tests.families.tiny_config import FULL, LINEAR, Tiny

_SIX_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
_DELTA_NET = {
    "head_dim": 64,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 48,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
_GRANITE_H = {
    "shared_intermediate_size": 96,
    "layer_types": [LINEAR, FULL, LINEAR],
    "num_hidden_layers": 3,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "time_step_limit": [0.3, 1.5],
}
_FALCON_H1 = {
    "num_hidden_layers": 2,
    "mamba_d_ssm": 192,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.25,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.6,
    "mlp_multipliers": [1.4, 0.5],
    "ssm_multipliers": [1.2, 0.8, 0.7, 1.1, 0.9],
    "ssm_in_multiplier": 0.75,
    "ssm_out_multiplier": 0.4,
}
_NEMOTRON_H = {
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 96,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "time_step_min": 1e-30,  # transformers' limit for prompts, but not for single tokens
}

RECURRENT_MODELS = {
    "granite-4-h": Tiny(
        "granitemoehybrid", {**_GRANITE_H, "num_local_experts": 0, "num_experts_per_tok": 0}
    ),
    "granite-4-h-moe": Tiny(
        "granitemoehybrid",
        {**_GRANITE_H, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 64},
    ),
    "qwen3.5": Tiny("qwen3_5_text", _DELTA_NET | {"tie_word_embeddings": True}),
    "qwen3.5-moe": Tiny(
        "qwen3_5_moe_text",
        {**_DELTA_NET, **_SIX_EXPERTS, "shared_expert_intermediate_size": 96},
    ),
    "qwen3-next": Tiny(
        "qwen3_next",
        {
            **_DELTA_NET,
            **_SIX_EXPERTS,
            "shared_expert_intermediate_size": 96,
            "mlp_only_layers": [1],
        },
    ),
    "lfm2": Tiny(
        "lfm2",
        {
            "layer_types": ["conv", FULL, "conv", "conv"],
            "conv_bias": True,
            "block_multiple_of": 32,
        },
    ),
    "lfm2-moe": Tiny(
        "lfm2_moe",
        {
            **_SIX_EXPERTS,
            "num_hidden_layers": 3,
            "layer_types": ["conv", FULL, "conv"],
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "falcon-h1": Tiny("falcon_h1", _FALCON_H1),
    "falcon-h1-normed": Tiny(
        "falcon_h1",
        {
            **_FALCON_H1,
            "mamba_rms_norm": True,
            "time_step_limit": [0.3, 1.5],
            "mlp_bias": True,
        },
    ),
    "nemotron-h": Tiny(
        "nemotron_h",
        {
            **_NEMOTRON_H,
            "layers_block_type": [LINEAR, "mlp", FULL, "mlp", LINEAR],
            "use_bias": True,
            "mlp_bias": True,
        },
    ),
    "nemotron-3": Tiny(
        "nemotron_h",
        {**_NEMOTRON_H, "layers_block_type": [LINEAR, "moe", LINEAR, FULL, "moe"]},
    ),
    "nemotron-3-latent": Tiny(
        "nemotron_h",
        {
            **_NEMOTRON_H,
            "layers_block_type": [LINEAR, "moe", FULL],
            "moe_latent_size": 64,
        },
    ),
}
