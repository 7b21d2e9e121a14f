"""The supported architectures with recurrent layers."""

from typing import Any

from legato.model import recurrent_families as families
from legato.model.architecture import Architecture
from legato.model.mlp_spec import MoeSpec
from legato.model.spec import DecoderSpec

_QWEN3_NEXT = {
    "max_position_embeddings": 2**15,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
}
_FURTHER_TOKENS = ("mtp.",)
_DELTA_NET: dict[str, Any] = {
    "names": {"linear_attn": "recurrence", "linear_attn.conv1d": "recurrence.conv"},
    "fused": ("q_proj",),
    "has_partial_rope": True,
    "adds_one": True,
    "unused_prefixes": _FURTHER_TOKENS,
}
_LFM2 = {
    "max_position_embeddings": 128_000,
    "num_key_value_heads": 8,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
_LFM2_IMPLIED = {"block_use_swiglu": (True,), "theta": (), "use_pos_enc": (True,)}
_LFM2_NAMES = {
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "embedding_norm": "norm",
    "feed_forward": "mlp",
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
    "feed_forward.expert_bias": "mlp.gate.selection_bias",
    "self_attn.out_proj": "self_attn.o_proj",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
    "conv.conv": "recurrence.conv",
    "conv.in_proj": "recurrence.in_proj",
    "conv.out_proj": "recurrence.out_proj",
}


def _granite_names(spec: DecoderSpec) -> dict[str, str]:
    """Return the name of the MLP for all rows, which is the layer's only one without experts."""
    has_experts = isinstance(spec.layers[0].mlp, MoeSpec)
    return {"shared_mlp": "mlp.shared_expert" if has_experts else "mlp"}


def _nemotron_names(spec: DecoderSpec) -> dict[str, str]:
    """Return the names of the layers' networks, which are all called `mixer`."""
    names: dict[str, str] = {}
    for i, layer in enumerate(spec.layers):
        network, norm = "self_attn", "input_layernorm"
        if layer.recurrence is not None:
            network = "recurrence"
        elif layer.mlp is not None:
            network, norm = "mlp", "post_attention_layernorm"
        names |= {
            f"layers.{i}.mixer": f"layers.{i}.{network}",
            f"layers.{i}.norm": f"layers.{i}.{norm}",
        }
    return names


RECURRENT_ARCHITECTURES = {
    "GraniteMoeHybridForCausalLM": Architecture(
        "granitemoehybrid",
        families.granite_hybrid,
        {
            "max_position_embeddings": 2048,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
        },
        names={
            "shared_mlp.input_linear": "shared_mlp.gate_up_proj",
            "shared_mlp.output_linear": "shared_mlp.down_proj",
            "block_sparse_moe.router.layer": "mlp.gate",
            "block_sparse_moe.input_linear": "mlp.experts.gate_up_proj",
            "block_sparse_moe.output_linear": "mlp.experts.down_proj",
            "mamba": "recurrence",
            "mamba.conv1d": "recurrence.conv",
        },
        names_of=_granite_names,
        fused=("gate_up_proj",),
        implied={"normalization_function": ("rmsnorm",)},
    ),
    "Qwen3_5ForCausalLM": Architecture(
        "qwen3_5_text",
        families.qwen3_5,
        {**_QWEN3_NEXT, "num_key_value_heads": 4},
        **_DELTA_NET,
        other_types=("qwen3_5",),
        implied={"attn_output_gate": (True,)},
    ),
    "Qwen3_5MoeForCausalLM": Architecture(
        "qwen3_5_moe_text",
        families.qwen3_5_moe,
        {
            **_QWEN3_NEXT,
            "intermediate_size": 512,  # all layers have experts
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
        **_DELTA_NET,
        other_types=("qwen3_5_moe",),
        implied={"attn_output_gate": (True,)},
    ),
    "Qwen3NextForCausalLM": Architecture(
        "qwen3_next",
        families.qwen3_next,
        {
            **_QWEN3_NEXT,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
        },
        **_DELTA_NET,
    ),
    "Lfm2ForCausalLM": Architecture(
        "lfm2",
        families.lfm2,
        {**_LFM2, "intermediate_size": 12288},
        names=_LFM2_NAMES,
        implied=_LFM2_IMPLIED,
    ),
    "Lfm2MoeForCausalLM": Architecture(
        "lfm2_moe",
        families.lfm2_moe,
        {
            **_LFM2,
            "intermediate_size": 7168,
            "block_auto_adjust_ff_dim": False,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
        },
        names=_LFM2_NAMES,
        implied=_LFM2_IMPLIED,
    ),
    "FalconH1ForCausalLM": Architecture(
        "falcon_h1",
        families.falcon_h1,
        {
            "max_position_embeddings": 8192,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "mamba_d_ssm": 1024,
        },
        names={
            "feed_forward": "mlp",
            "pre_ff_layernorm": "post_attention_layernorm",
            "final_layernorm": "norm",
            "mamba": "recurrence",
            "mamba.conv1d": "recurrence.conv",
        },
        implied={"mamba_use_mlp": (True,)},
    ),
    "NemotronHForCausalLM": Architecture(
        "nemotron_h",
        families.nemotron_h,
        {
            "num_hidden_layers": 4,  # replaced by the number of kinds
            "hybrid_override_pattern": "ME*-",
            "max_position_embeddings": 4096,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 21504,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        names={
            "backbone": "model",
            "embeddings": "embed_tokens",
            "norm_f": "norm",
            "conv1d": "conv",
            "shared_experts": "shared_expert",
            "e_score_correction_bias": "selection_bias",
        },
        names_of=_nemotron_names,
        unused_prefixes=_FURTHER_TOKENS,
        implied={"rms_norm_eps": (), "rope_theta": ()},
    ),
}
"""Key a name in a configuration's `architectures`."""
