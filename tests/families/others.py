"""Tiny random checkpoints of the families that only transformers' layers run."""

from tests.families.tiny import WINDOW, Tiny

_KINDS = ["sliding_attention", "full_attention"] * 2
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "head_dim": 32,
}

OTHERS = {
    "afmoe": Tiny(
        "afmoe",
        {
            **_EXPERTS,
            "num_local_experts": 4,
            "num_dense_layers": 1,
            "head_dim": 32,
            "sliding_window": WINDOW,
        },
    ),
    "biogpt": Tiny("biogpt"),
    "cohere": Tiny("cohere", {"use_qk_norm": True, "logit_scale": 0.25}),
    "cwm": Tiny(
        "cwm",
        {
            "head_dim": 32,
            "sliding_window": WINDOW,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "dots1": Tiny("dots1", {**_ROUTED, "n_shared_experts": 1}),
    "ernie4.5-moe": Tiny(
        "ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64}
    ),
    "gemma": Tiny("gemma", {"head_dim": 64}),
    "glm": Tiny("glm", {"head_dim": 64}),
    "glm4-moe": Tiny("glm4_moe", _ROUTED),
    "gpt2": Tiny("gpt2", {"n_inner": 96, "scale_attn_by_inverse_layer_idx": True}),
    "gpt-bigcode": Tiny("gpt_bigcode"),
    "granitemoe": Tiny(
        "granitemoe",
        {"num_local_experts": 4, "attention_multiplier": 0.2, "embedding_multiplier": 12.0},
    ),
    "granite-swa": Tiny(
        "granite_swa",
        {
            "sliding_window": WINDOW,
            "attention_multiplier": 0.2,
            "layer_rope_theta": [0, 1e4, 1e3, 1e4],
        },
    ),
    "granitemoe-swa": Tiny(
        "granitemoe_swa",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "attention_multiplier": 0.2,
        },
    ),
    "helium": Tiny("helium", {"head_dim": 32}),
    "hyperclovax": Tiny("hyperclovax"),
    "jais2": Tiny("jais2"),
    "minimax-m2": Tiny(
        "minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
    ),
    "ministral": Tiny(
        "ministral", {"head_dim": 32, "sliding_window": WINDOW, "layer_types": _KINDS}
    ),
    "mixtral": Tiny("mixtral", {"num_local_experts": 4, "sliding_window": WINDOW}),
    "nanochat": Tiny("nanochat"),
    "nemotron": Tiny("nemotron", {"partial_rotary_factor": 0.5}),
    "olmo": Tiny("olmo", {"clip_qkv": 1.0}),
    "olmoe": Tiny("olmoe", _EXPERTS),
    "opt": Tiny("opt", {"ffn_dim": 96, "word_embed_proj_dim": 128}),
    "persimmon": Tiny("persimmon"),
    "phi": Tiny("phi", {"partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "phimoe": Tiny("phimoe", {"num_local_experts": 4}),
    "qwen2-moe": Tiny("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3-moe": Tiny("qwen3_moe", {**_EXPERTS, "head_dim": 32}),
    "stablelm": Tiny("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm-2": Tiny("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "vaultgemma": Tiny(
        "vaultgemma",
        {
            "head_dim": 64,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 30.0,
        },
    ),
}
