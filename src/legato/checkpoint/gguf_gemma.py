"""Gemma 2, 3 and 4 in GGUF files. The norms of the first two have their 1 added."""

from typing import Any

from legato.checkpoint.gguf_architectures import ROPE_FACTORS, GGUFArchitecture, common_config
from legato.checkpoint.gguf_file import GGUFFile
from legato.core.errors import UnsupportedModelError
from legato.model.description import FULL, SLIDING

_INTERVALS = {"gemma2": 2, "gemma3": 6}
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Models whose queries are scaled otherwise than by the size of a head; the format does not say."""
_NEVER = 1e29
"""From here on, a divisor of a frequency means that the pair of dimensions does not rotate."""


def _dense_config(file: GGUFFile) -> dict[str, Any]:
    """Describe Gemma 2 and 3, as far as they are alike."""
    common = common_config(file)
    num_layers, head_dim = common["num_hidden_layers"], common["head_dim"]
    if num_layers == _LAYERS_OF_27B[file.architecture]:
        head_dim = common["hidden_size"] // common["num_attention_heads"]
    window = file.get("attention.sliding_window")
    interval = _INTERVALS[file.architecture] if window else 1
    return {
        **common,
        "query_pre_attn_scalar": head_dim,
        "sliding_window": window,
        "layer_types": _kinds(file, interval, num_layers),
        "final_logit_softcapping": file.get("final_logit_softcapping"),
    }


def _kinds(file: GGUFFile, interval: int, num_layers: int) -> list[str]:
    """Return the kind of each layer; the file may say it, or how many layers are between two.

    Args:
        interval: in a file that says neither.
    """
    pattern = file.get("attention.sliding_window_pattern", interval)
    if isinstance(pattern, list):
        return [SLIDING if is_sliding else FULL for is_sliding in pattern]
    return [SLIDING if pattern and (i + 1) % pattern else FULL for i in range(num_layers)]


def _gemma2_config(file: GGUFFile) -> dict[str, Any]:
    return {
        **_dense_config(file),
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": file.get("attn_logit_softcapping"),
    }


def _gemma3_config(file: GGUFFile) -> dict[str, Any]:
    contents = _dense_config(file)
    return contents | {
        "architectures": ["Gemma3ForCausalLM"],
        "rope_parameters": {FULL: contents["rope_parameters"], SLIDING: _sliding_rope(file)},
    }


def _sliding_rope(file: GGUFFile) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": file.get("rope.freq_base_swa", 10000.0)}


def _gemma4_config(file: GGUFFile) -> dict[str, Any]:
    """Describe Gemma 4: layers differ in their heads, in the width of MLPs, and in rope."""
    num_layers, num_heads = file.needed("block_count"), file.needed("attention.head_count")
    kinds = _kinds(file, 1, num_layers)
    heads_of_layers = _by_layer(file, "attention.head_count_kv", num_layers)
    num_kv_heads = dict(zip(kinds, heads_of_layers, strict=True))
    widths = _by_layer(file, "feed_forward_length", num_layers)
    num_own = num_layers - file.get("attention.shared_kv_layers", 0)
    full = [i for i, kind in enumerate(kinds[:num_own]) if kind == FULL]
    head_dim, full_head_dim = _head_sizes(file)
    table = file.tensors.get("per_layer_token_embd.weight")
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": file.needed("embedding_length"),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "num_hidden_layers": num_layers,
        "layer_types": kinds,
        "sliding_window": file.needed("attention.sliding_window"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads.get(SLIDING, num_kv_heads[FULL]),
        "num_global_key_value_heads": num_kv_heads[FULL],
        "attention_k_eq_v": not any(f"blk.{i}.attn_v.weight" in file.tensors for i in full),
        "num_kv_shared_layers": num_layers - num_own,
        "head_dim": head_dim,
        "global_head_dim": full_head_dim,
        "rms_norm_eps": file.needed("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": file.needed("context_length"),
        "rope_parameters": {FULL: _proportional_rope(file), SLIDING: _sliding_rope(file)},
        "final_logit_softcapping": file.get("final_logit_softcapping"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_size_per_layer_input": file.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": table.shape[0] if table else 0,
        "enable_moe_block": bool(file.get("expert_count")),
        "num_experts": file.get("expert_count"),
        "top_k_experts": file.get("expert_used_count"),
        "moe_intermediate_size": file.get("expert_feed_forward_length"),
    }


def _by_layer(file: GGUFFile, key: str, num_layers: int) -> list[int]:
    value = file.needed(key)
    return value if isinstance(value, list) else [value] * num_layers


def _head_sizes(file: GGUFFile) -> tuple[int, int]:
    """Return the sizes of heads in layers with a window, and without.

    Raises:
        UnsupportedModelError: those of values differ, or rope turns a part of the former.
    """
    sizes: list[int] = []
    for end in ("_swa", ""):
        key, value, turned = (
            file.needed(f"{name}{end}")
            for name in ("attention.key_length", "attention.value_length", "rope.dimension_count")
        )
        if not key == value == turned:
            raise UnsupportedModelError(
                f"{file.path}: heads with {key} dimensions of keys, {value} of values and {turned} "
                "that rotate are not supported"
            )
        sizes.append(key)
    return sizes[0], sizes[1]


def _proportional_rope(file: GGUFFile) -> dict[str, Any]:
    """Return rope parameters of layers without a window: only some pairs of dimensions rotate."""
    theta = {"rope_theta": file.get("rope.freq_base", 1e6)}
    if ROPE_FACTORS not in file.tensors:
        return {"rope_type": "default", **theta}
    divisors = file.read(ROPE_FACTORS)
    turned = int((divisors < _NEVER).sum())
    if (divisors[:turned] != 1).any() or (divisors[turned:] < _NEVER).any():
        raise UnsupportedModelError(f"{file.path}: {ROPE_FACTORS} has other values than 1 and 1e30")
    part = {"partial_rotary_factor": turned / len(divisors)}
    return {"rope_type": "proportional", **theta, **part}


_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NAMES4 = {
    **_NAMES,
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps": "experts.gate_up_proj",
    "ffn_gate_exps": "experts.gate_proj",
    "ffn_up_exps": "experts.up_proj",
    "ffn_down_exps": "experts.down_proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}

GEMMA = {
    "gemma2": GGUFArchitecture(_gemma2_config, _NAMES),
    "gemma3": GGUFArchitecture(_gemma3_config, _NAMES),
    "gemma4": GGUFArchitecture(_gemma4_config, _NAMES4),
}
"""Key `general.architecture`."""
