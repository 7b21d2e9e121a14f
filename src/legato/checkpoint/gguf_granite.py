"""Granite 3 and 4, and Nemotron-H, which is converted alike, in GGUF files."""

from typing import Any

from legato.checkpoint.gguf_architectures import (
    CONVOLUTIONS,
    EXPERT_NAMES,
    LOG_RATES,
    MAMBA2_NAMES,
    VECTORS,
    GGUFArchitecture,
    common_config,
    has_attention_bias,
    layer_counts,
    without_predictors,
)
from legato.checkpoint.gguf_file import GGUFFile
from legato.core.errors import UnsupportedModelError
from legato.model.description import FULL


def _granite_config(file: GGUFFile) -> dict[str, Any]:
    if file.get("rope.scaling.finetuned") is False:
        raise UnsupportedModelError(f"{file.path}: Granite without positions is not supported")
    return {
        **common_config(file),
        "architectures": ["GraniteForCausalLM"],
        # Of a Granite 4 without experts, which has another size for those.
        "intermediate_size": _mlp_size(file),
        "attention_bias": has_attention_bias(file),
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "attention_multiplier": file.needed("attention.scale"),
        "embedding_multiplier": file.get("embedding_scale", 1.0),
        "residual_multiplier": file.get("residual_scale", 1.0),
        "logits_scaling": file.get("logit_scale", 1.0),
    }


def _mlp_size(file: GGUFFile) -> int:
    matrix = file.tensors.get("blk.0.ffn_up.weight")
    return matrix.shape[0] if matrix else int(file.needed("feed_forward_length"))


def _granite_moe_config(file: GGUFFile) -> dict[str, Any]:
    """Describe Granite's mixtures; with an expert for all tokens, they are Granite 4's."""
    contents = {
        **_granite_config(file),
        "architectures": ["GraniteMoeForCausalLM"],
        "num_local_experts": file.needed("expert_count"),
        "num_experts_per_tok": file.needed("expert_used_count"),
    }
    shared_size = file.get("expert_shared_feed_forward_length")
    if not shared_size:
        return contents
    return contents | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": [FULL] * contents["num_hidden_layers"],
        "position_embedding_type": "rope",
        "shared_intermediate_size": shared_size,
    }


_KINDS = {"ssm_a": "M", "attn_q.weight": "*", "ffn_gate_inp.weight": "E", "ffn_up.weight": "-"}
"""Key a tensor that only such layers have, value the letter of the kind."""


def _nemotron_config(file: GGUFFile) -> dict[str, Any]:
    """Describe Nemotron-H and Nemotron 3; a layer is of the kind that its tensors are of."""
    layers = layer_counts(file)
    pattern = [
        "".join(kind for tensor, kind in _KINDS.items() if f"blk.{i}.{tensor}" in file.tensors)
        for i in range(layers["num_hidden_layers"])
    ]
    if others := [i for i, kinds in enumerate(pattern) if len(kinds) != 1]:
        raise UnsupportedModelError(f"{file.path}: block {others[0]} is of no known kind")
    size, num_heads = file.needed("ssm.inner_size"), file.needed("ssm.time_step_rank")
    mean_eps = file.get("attention.layer_norm_epsilon")
    common = common_config(file)
    # A layer has no positions, though the file has keys for them, and a norm has one epsilon.
    for key in ("rope_parameters", "rms_norm_eps", "layer_norm_eps"):
        common.pop(key, None)
    return {
        **common,
        **layers,
        **(_nemotron_experts(file) if "E" in pattern else {}),
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "".join(pattern),
        "layer_norm_epsilon": file.get("attention.layer_norm_rms_epsilon", mean_eps),
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in file.tensors),
        "use_bias": any(name.endswith("ssm_in.bias") for name in file.tensors),
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in file.tensors),
        "mamba_num_heads": num_heads,
        "mamba_head_dim": size // num_heads,
        "n_groups": file.needed("ssm.group_count"),
        "ssm_state_size": file.needed("ssm.state_size"),
        "conv_kernel": file.needed("ssm.conv_kernel"),
    }


def _nemotron_experts(file: GGUFFile) -> dict[str, Any]:
    return {
        "n_routed_experts": file.needed("expert_count"),
        "num_experts_per_tok": file.needed("expert_used_count"),
        "moe_intermediate_size": file.needed("expert_feed_forward_length"),
        "norm_topk_prob": file.get("expert_weights_norm", True),
        "routed_scaling_factor": file.get("expert_weights_scale", 1.0),
        "n_group": file.get("expert_group_count", 1),
        "topk_group": file.get("expert_group_used_count", 1),
        "moe_shared_expert_intermediate_size": file.get("expert_shared_feed_forward_length", 0),
        "moe_latent_size": file.get("moe_latent_size"),
    }


_NEMOTRON = GGUFArchitecture(
    _nemotron_config,
    {
        **EXPERT_NAMES,
        **MAMBA2_NAMES,
        "attn_norm": "norm",
        "ffn_latent_down": "mlp.fc1_latent_proj",
        "ffn_latent_up": "mlp.fc2_latent_proj",
    },
    lambda file, spec: [*without_predictors(file, spec), LOG_RATES, VECTORS, CONVOLUTIONS],
    implied={"rope.scaling.type": ("none",)},
)

GRANITE = {
    "granite": GGUFArchitecture(_granite_config, has_paired_rows=True),
    "granitemoe": GGUFArchitecture(_granite_moe_config, EXPERT_NAMES, has_paired_rows=True),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
}
"""Key `general.architecture`."""
