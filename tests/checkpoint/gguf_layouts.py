"""How llama.cpp's converter writes a family: metadata, and tensors in another form."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from gguf import GGUFWriter

from tests.families.tiny import MODELS
from tests.families.tiny_config import FULL, Tiny

SOFTMAX, SIGMOID = 1, 2
Values = dict[str, Any]
Change = Callable[[str, torch.Tensor, Any], Iterable[tuple[str, torch.Tensor]]]
"""Maps a tensor's name, its rows and the configuration to tensors in the file."""


def unchanged(name: str, rows: torch.Tensor, _: Any) -> Iterable[tuple[str, torch.Tensor]]:
    yield name, rows


def paired(name: str, rows: torch.Tensor, config: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """Rows that rotate together are neighbours."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    module = name.split(".")[-2]
    if module in heads:
        halves = rows.reshape(heads[module], 2, -1, *rows.shape[1:])
        rows = halves.transpose(1, 2).reshape(rows.shape)
    yield name, rows


def halved(name: str, rows: torch.Tensor, config: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """GLM-4's neighbours in halves of the rotated part, for positions of several axes."""
    if name.split(".")[-2] in ("q_proj", "k_proj"):
        heads = rows.reshape(-1, config.head_dim, *rows.shape[1:])
        turned = config.head_dim // 2
        parts = heads[:, :turned:2], heads[:, 1:turned:2], heads[:, turned:]
        rows = torch.cat(parts, dim=1).reshape(rows.shape)
    yield name, rows


def parts_apart(name: str, rows: torch.Tensor, config: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """GPT-NeoX's queries of all heads, then keys and values."""
    if "query_key_value" in name:
        heads = rows.reshape(config.num_attention_heads, 3, -1, *rows.shape[1:])
        rows = heads.transpose(0, 1).reshape(rows.shape)
    yield name, rows


def heads_apart(name: str, rows: torch.Tensor, config: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """Projections of latents to keys, transposed, and to values."""
    if not name.endswith("kv_b_proj.weight"):
        yield name, rows
        return
    heads = rows.view(config.num_attention_heads, -1, rows.shape[1])
    keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    yield name.replace("kv_b", "k_b"), keys.transpose(1, 2)
    yield name.replace("kv_b", "v_b"), values


def with_factors(name: str, rows: torch.Tensor, config: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """Falcon-H1's factors in its weights, and Mamba's tensors in llama.cpp's form."""
    gate, down = config.mlp_multipliers
    factors = {
        "gate_proj": gate,
        "down_proj": down,
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    module = name.removesuffix(".weight").rpartition(".")[2]
    rows = rows * factors.get(module, 1.0)
    if module == "in_proj":
        size, states = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        parts = rows.split([size, size, states, states, config.mamba_n_heads])
        scales = config.ssm_multipliers
        rows = torch.cat([part * s for part, s in zip(parts, scales, strict=True)])
        rows = rows * config.ssm_in_multiplier
    elif module in ("A_log", "D"):
        rows = (-rows.exp() if module == "A_log" else rows)[:, None]
    elif name.endswith("mamba.norm.weight"):
        rows = rows.view(config.mamba_n_groups, -1)
    elif name.endswith("conv1d.weight"):
        rows = rows.squeeze(1)
    yield name.replace("dt_bias", "dt_proj.bias"), rows


def rope_size(share: float = 1.0) -> Callable[[Any], Values]:
    return lambda config: {
        "rope.dimension_count": int(share * (getattr(config, "head_dim", None) or head_dim(config)))
    }


def head_dim(config: Any) -> int:
    return config.hidden_size // config.num_attention_heads


def window(config: Any) -> Values:
    kinds = [kind == "sliding_attention" for kind in config.layer_types]
    return {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": kinds,
    }


def gpt_neox(config: Any, *, is_parallel: bool) -> Values:
    return {
        **rope_size(0.25)(config),
        "attention.head_count_kv": None,
        "use_parallel_residual": is_parallel,
    }


def deepseek(config: Any) -> Values:
    """Attention as over one head of keys, which are latents."""
    rank, rope_dim = config.kv_lora_rank, config.qk_rope_head_dim
    scale = config.rope_parameters.get("mscale_all_dim")
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope_dim,
        "attention.value_length": rank,
        "attention.key_length_mla": config.qk_nope_head_dim + rope_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": rope_dim,
        "rope.scaling.yarn_log_multiplier": scale and 0.1 * scale,
        **mixture(config),
    }


def old_deepseek(config: Any) -> Values:
    return deepseek(config) | {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length": config.v_head_dim,
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
    }


def mixture(config: Any) -> Values:
    """Keys of DeepSeek's experts, and of relatives'."""
    if not hasattr(config, "n_routed_experts"):
        return {
            "leading_dense_block_count": config.num_hidden_layers,
            "expert_shared_count": 0,
            "expert_feed_forward_length": config.intermediate_size,
        }
    return {
        "expert_count": config.n_routed_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": config.norm_topk_prob,
        "leading_dense_block_count": getattr(config, "first_k_dense_replace", 0),
    }


LLAMA4 = Tiny(
    "llama4_text",
    {
        **MODELS["llama4-maverick"].settings,
        "use_qk_norm": True,
        "attention_chunk_size": 8192,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
)


def llama4(config: Any) -> Values:
    return {
        **rope_size()(config),
        "feed_forward_length": config.intermediate_size_mlp,
        "expert_feed_forward_length": config.intermediate_size,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
        "vocab_size": config.vocab_size,
    }


def sized(config: Any) -> Values:
    size = config.moe_intermediate_size
    return {"expert_feed_forward_length": size[0] if isinstance(size, list) else size}


def common(config: Any) -> Values:
    """The keys that the converter writes for all decoders, as far as a configuration has them."""
    rope = config.rope_parameters
    rope = rope.get(FULL, rope)
    own = {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "attention.layer_norm_epsilon": "layer_norm_eps",
        "attention.key_length": "head_dim",
        "attention.value_length": "head_dim",
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
    }
    values = {key: getattr(config, name, None) for key, name in own.items()}
    values["rope.freq_base"] = float(rope["rope_theta"])
    if hasattr(config, "norm_epsilon"):
        values["attention.layer_norm_epsilon"] = config.norm_epsilon
    if hasattr(config, "num_experts"):
        values["expert_count"] = config.num_experts
    if rope["rope_type"] == "yarn":
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
        }
    return values


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_uint32(key, value)
