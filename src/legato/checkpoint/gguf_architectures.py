"""The architectures of GGUF files: their metadata and tensors in transformers' words."""

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch

from legato.checkpoint.gguf_file import GGUFFile
from legato.checkpoint.gguf_transforms import with_grouped_heads
from legato.core.errors import UnsupportedModelError
from legato.model.description import FULL
from legato.model.mixer_spec import DeltaNetSpec
from legato.model.quantization import plain
from legato.model.rope import temperature
from legato.model.spec import DecoderSpec
from legato.model.transforms import Named, Transform, Weight, drop, split_experts

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
NO_WEIGHTS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
"""Tensors that become parameters of rope."""
_LINEAR = "linear_attention"
_SIGMOID = 2  # an `expert_gating_func`


class GGUFArchitecture(NamedTuple):
    """Attributes:
    config: turns a file's metadata into fields of config.json.
    names: further names of a layer's tensors; key the name in the file, value in the layer.
    changes: returns transforms of the tensors, before those of transformers' checkpoints.
    implied: metadata keys that are not read, with the values that the architecture always has.
    has_paired_rows: rows of queries and keys that rotate together are neighbours in a head.
    """

    config: Callable[[GGUFFile], dict[str, Any]]
    names: Mapping[str, str] = {}
    changes: Callable[[GGUFFile, DecoderSpec], list[Transform]] = lambda *_: []
    implied: Mapping[str, tuple[Any, ...]] = {}
    has_paired_rows: bool = False


def _llama_config(file: GGUFFile) -> dict[str, Any]:
    """Describe a Llama, Mistral or Mixtral model; all are named "llama".

    Only Mistral has a window, and only Mixtral has experts.
    """
    window = file.get("attention.sliding_window")
    if file.get("expert_count"):
        return {
            **common_config(file),
            **expert_config(file),
            "architectures": ["MixtralForCausalLM"],
            "sliding_window": window,
        }
    if window:
        return {
            **common_config(file),
            "architectures": ["MistralForCausalLM"],
            "sliding_window": window,
        }
    return {
        **common_config(file),
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": has_attention_bias(file),
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }


def _qwen2_config(file: GGUFFile) -> dict[str, Any]:
    _refuse_window(file)
    return {**common_config(file), "architectures": ["Qwen2ForCausalLM"]}


def _qwen3_config(file: GGUFFile) -> dict[str, Any]:
    _refuse_window(file)
    return {
        **common_config(file),
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": has_attention_bias(file),
    }


def _qwen3_moe_config(file: GGUFFile) -> dict[str, Any]:
    _refuse_window(file)
    return {
        **common_config(file),
        **expert_config(file),
        "architectures": ["Qwen3MoeForCausalLM"],
        # The format does not say; all published models have it.
        "norm_topk_prob": True,
    }


def _phi3_config(file: GGUFFile) -> dict[str, Any]:
    common = common_config(file)
    length = file.get("rope.scaling.original_context_length", common["max_position_embeddings"])
    return {
        **common,
        "architectures": ["Phi3ForCausalLM"],
        "original_max_position_embeddings": length,
        # Phi-4, which has none, says 0.
        "sliding_window": file.get("attention.sliding_window") or None,
    }


def _gpt_oss_config(file: GGUFFile) -> dict[str, Any]:
    common = common_config(file)
    return {
        **common,
        **expert_config(file),
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "sliding_window": file.needed("attention.sliding_window"),
        "rope_parameters": {**common["rope_parameters"], "truncate": False},
    }


def _granite_hybrid_config(file: GGUFFile) -> dict[str, Any]:
    """Describe Granite 4 H, with experts or without; the limits of its steps are not in the file.

    Rows of queries and keys are in another order than transformers', the same for both. So without
    rope, their products are the same.
    """
    if file.get("rope.scaling.finetuned"):
        raise UnsupportedModelError(f"{file.path}: rope beside recurrent layers is not supported")
    common = common_config(file)
    size, num_heads = file.needed("ssm.inner_size"), file.needed("ssm.time_step_rank")
    return {
        **common,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": _kinds(file, "ssm_a", _LINEAR, common["num_hidden_layers"]),
        "num_local_experts": file.get("expert_count", 0),
        "num_experts_per_tok": file.get("expert_used_count", 0),
        "shared_intermediate_size": file.needed("expert_shared_feed_forward_length"),
        "attention_multiplier": file.needed("attention.scale"),
        "embedding_multiplier": file.get("embedding_scale", 1.0),
        "residual_multiplier": file.get("residual_scale", 1.0),
        "logits_scaling": file.get("logit_scale", 1.0),
        "mamba_expand": size // common["hidden_size"],
        "mamba_n_heads": num_heads,
        "mamba_d_head": size // num_heads,
        "mamba_n_groups": file.needed("ssm.group_count"),
        "mamba_d_state": file.needed("ssm.state_size"),
        "mamba_d_conv": file.needed("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in file.tensors),
    }


def _lfm2_config(file: GGUFFile) -> dict[str, Any]:
    """Describe LFM2; a layer without attention has a convolution, and no key/value heads."""
    _refuse_window(file)
    common = common_config(file)
    norm_eps = common.pop("rms_norm_eps")
    return {
        **common,
        "architectures": ["Lfm2ForCausalLM"],
        "norm_eps": norm_eps,
        "layer_types": _kinds(file, "shortconv.conv.weight", "conv", file.get("block_count")),
        "conv_L_cache": file.needed("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in file.tensors),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_moe_config(file: GGUFFile) -> dict[str, Any]:
    return {
        **_lfm2_config(file),
        **expert_config(file),
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_dense_layers": file.get("leading_dense_block_count", 0),
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in file.tensors),
        "routed_scaling_factor": file.get("expert_weights_scale", 1.0),
    }


def _qwen3_5_config(file: GGUFFile) -> dict[str, Any]:
    """Describe Qwen3.5."""
    layers = layer_counts(file)
    num_heads = file.needed("ssm.time_step_rank")
    return {
        **common_config(file),
        **layers,
        "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": _kinds(file, "ssm_a", _LINEAR, layers["num_hidden_layers"]),
        "linear_num_value_heads": num_heads,
        "linear_num_key_heads": file.needed("ssm.group_count"),
        "linear_key_head_dim": file.needed("ssm.state_size"),
        "linear_value_head_dim": file.needed("ssm.inner_size") // num_heads,
        "linear_conv_kernel_dim": file.needed("ssm.conv_kernel"),
    }


def _qwen3_5_moe_config(file: GGUFFile) -> dict[str, Any]:
    return {
        **_qwen3_5_config(file),
        **expert_config(file),
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "shared_expert_intermediate_size": shared_size(file),
    }


def _qwen3_next_config(file: GGUFFile) -> dict[str, Any]:
    contents = _qwen3_5_moe_config(file)
    layers = range(contents["num_hidden_layers"])
    return contents | {
        "architectures": ["Qwen3NextForCausalLM"],
        "mlp_only_layers": [
            i for i in layers if f"blk.{i}.ffn_gate_inp.weight" not in file.tensors
        ],
    }


def has_attention_bias(file: GGUFFile) -> bool:
    """Whether queries have biases, which may be fused with those of keys and values."""
    return any(f"blk.0.attn_{part}.bias" in file.tensors for part in ("q", "qkv"))


def layer_counts(file: GGUFFile) -> dict[str, int]:
    """Return the numbers of layers, and of predictors of further tokens, which the file adds up."""
    num_further = file.get("nextn_predict_layers", 0)
    num_layers = file.needed("block_count") - num_further
    if num_further < 0 or num_layers < 1:
        raise UnsupportedModelError(f"{file.path}: nextn_predict_layers is {num_further}")
    return {"num_hidden_layers": num_layers, "num_nextn_predict_layers": num_further}


def expert_config(file: GGUFFile) -> dict[str, Any]:
    return {
        "num_experts": file.needed("expert_count"),
        "num_experts_per_tok": file.needed("expert_used_count"),
        "moe_intermediate_size": file.get("expert_feed_forward_length"),
    }


def shared_size(file: GGUFFile) -> int:
    """Return the width of the expert for all tokens, by its tensors."""
    tensors = file.tensors.items()
    sizes = (tensor.shape[0] for name, tensor in tensors if name.endswith("up_shexp.weight"))
    return next(sizes, 0)


def _kinds(file: GGUFFile, tensor: str, kind: str, num_layers: int) -> list[str]:
    """Return the kind of each layer: `kind` if it has the tensor, else full attention."""
    return [kind if f"blk.{i}.{tensor}" in file.tensors else FULL for i in range(num_layers)]


def common_config(file: GGUFFile, head_dim: int | None = None) -> dict[str, Any]:
    """Return the keys that most families read.

    Args:
        head_dim: None for the size of keys, which is then that of values.
    """
    hidden_size = file.needed("embedding_length")
    num_heads = file.needed("attention.head_count")
    kv_heads = file.get("attention.head_count_kv", num_heads)  # a list if layers differ
    if head_dim is None:
        head_dim = int(file.get("attention.key_length", hidden_size // num_heads))
        if file.get("attention.value_length", head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{file.path}: keys and values of different sizes are not supported"
            )
    if file.get("attention.causal") is False:
        raise UnsupportedModelError(f"{file.path}: attention to later tokens is not supported")
    return {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": _mlp_size(file),
        "num_hidden_layers": file.needed("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(kv_heads) if isinstance(kv_heads, list) else kv_heads,
        "head_dim": head_dim,
        **_norm_eps(file),
        "max_position_embeddings": file.needed("context_length"),
        "rope_parameters": _rope_parameters(file) | _rotated_part(file, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def _norm_eps(file: GGUFFile) -> dict[str, float]:
    """Return the key of the norms' epsilon; a file has it for the kind of norm that it has."""
    mean = file.get("attention.layer_norm_epsilon")
    if mean is not None:
        return {"layer_norm_eps": mean}
    return {"rms_norm_eps": file.needed("attention.layer_norm_rms_epsilon")}


def _mlp_size(file: GGUFFile) -> int:
    """Return the width of the MLPs; that of an expert in files where all layers have experts.

    Of widths by layer, it is the largest.
    """
    size = file.get("feed_forward_length") or file.get("expert_feed_forward_length")
    size = size or file.needed("feed_forward_length")
    return int(max(size) if isinstance(size, list) else size)


def _rotated_part(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    """Return the rope parameter of the part of a head that rotates."""
    size = file.get("rope.dimension_count", head_dim)
    if size > head_dim:
        raise UnsupportedModelError(f"{file.path}: rope on {size} of {head_dim} dimensions")
    return {"partial_rotary_factor": size / head_dim}


def _rope_parameters(file: GGUFFile) -> dict[str, Any]:
    """Return rope parameters; Llama 3's tensor of divisors becomes LongRoPE with one factor set."""
    context_length = file.get("context_length")
    original_length = file.get("rope.scaling.original_context_length", context_length)
    parameters: dict[str, Any] = {"rope_theta": file.get("rope.freq_base", 10000.0)}
    scaling = file.get("rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        factors = file.read(ROPE_FACTORS).tolist()
        return parameters | {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context_length,
        }
    if LONG_FACTORS in file.tensors:
        return parameters | {
            "rope_type": "longrope",
            "short_factor": file.read(SHORT_FACTORS).tolist(),
            "long_factor": file.read(LONG_FACTORS).tolist(),
            "attention_factor": file.get("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": original_length,
        }
    if scaling == "none":
        return parameters | {"rope_type": "default"}
    if scaling not in ("linear", "yarn"):
        raise UnsupportedModelError(f"{file.path}: unsupported rope scaling {scaling!r}")
    parameters |= {"rope_type": scaling, "factor": file.get("rope.scaling.factor", 1.0)}
    if scaling == "yarn":
        parameters["original_max_position_embeddings"] = original_length
        parameters |= _yarn_parameters(file, parameters["factor"])
    return parameters


def _yarn_parameters(file: GGUFFile, factor: float) -> dict[str, Any]:
    """Return YaRN's other parameters; the file's factors multiply the usual temperature."""
    found = {
        name: file.get(f"rope.scaling.yarn_{name}", None) for name in ("beta_fast", "beta_slow")
    }
    growth = file.get("rope.scaling.attn_factor", 1.0)
    growth *= file.get("rope.scaling.yarn_attn_factor", 1.0)
    found["attention_factor"] = None if growth == 1 else growth * temperature(factor)
    return {name: value for name, value in found.items() if value is not None}


def _refuse_window(file: GGUFFile) -> None:
    # The format does not say which layers have the window.
    if file.get("attention.sliding_window"):
        raise UnsupportedModelError(
            f"{file.path}: a sliding window is not supported for {file.architecture!r} GGUF files"
        )


def _at(*ends: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Transform:
    """Change the tensors whose names end so."""

    def apply(name: str, weight: Weight) -> list[Named]:
        return [(name, change(plain(weight)) if name.endswith(ends) else weight)]

    return apply


CONVOLUTIONS = _at("recurrence.conv.weight", change=lambda taps: taps[:, None])
"""From [C, k] to [C, 1, k]."""
LOG_RATES = _at("recurrence.A_log", change=lambda rates: (-rates).log())
"""From -exp(A_log) to A_log."""
VECTORS = _at(
    "recurrence.A_log", "recurrence.D", "recurrence.norm.weight", change=torch.Tensor.flatten
)
"""From matrices."""
SHARED_GATES = _at("shared_expert_gate.weight", change=lambda gate: gate.reshape(1, -1))
"""From [E] to [1, E]."""


def expert_splits(_: GGUFFile, spec: DecoderSpec) -> list[Transform]:
    """Split experts that transformers has in another layout than GGUF files."""
    found = (moe for layer in spec.layers if (moe := layer.moe) is not None)
    return [split_experts(moe, spec.hidden_size) for moe in islice(found, 1)]


def without_predictors(file: GGUFFile, spec: DecoderSpec) -> list[Transform]:
    """Leave out the tensors of predictors of further tokens that no layer has."""
    num_further = file.get("nextn_predict_layers", 0)
    return [drop(prefixes=tuple(f"blk.{spec.num_layers + i}." for i in range(num_further)))]


def _delta_net_changes(file: GGUFFile, spec: DecoderSpec) -> list[Transform]:
    return [*without_predictors(file, spec), LOG_RATES, CONVOLUTIONS, SHARED_GATES]


def _qwen3_5_changes(file: GGUFFile, spec: DecoderSpec) -> list[Transform]:
    nets = (layer.recurrence for layer in spec.layers)
    net = next(net for net in nets if isinstance(net, DeltaNetSpec))
    return [*_delta_net_changes(file, spec), with_grouped_heads(net)]


EXPERT_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.selection_bias",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
}
MAMBA2_NAMES = {
    "ssm_in": "recurrence.in_proj",
    "ssm_conv1d": "recurrence.conv",
    "ssm_a": "recurrence.A_log",
    "ssm_d": "recurrence.D",
    "ssm_dt.bias": "recurrence.dt_bias",
    "ssm_norm": "recurrence.norm",
    "ssm_out": "recurrence.out_proj",
}
_LFM2 = {
    "shortconv.conv": "recurrence.conv",
    "shortconv.in_proj": "recurrence.in_proj",
    "shortconv.out_proj": "recurrence.out_proj",
}
_DELTA_NET = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "recurrence.in_proj_qkv",
    "attn_gate": "recurrence.in_proj_z",
    "ssm_beta": "recurrence.in_proj_b",
    "ssm_alpha": "recurrence.in_proj_a",
    "ssm_ba": "recurrence.in_proj_ba",
    "ssm_conv1d": "recurrence.conv",
    "ssm_a": "recurrence.A_log",
    "ssm_dt.bias": "recurrence.dt_bias",
    "ssm_norm": "recurrence.norm",
    "ssm_out": "recurrence.out_proj",
}

ARCHITECTURES = {
    "llama": GGUFArchitecture(_llama_config, EXPERT_NAMES, has_paired_rows=True),
    "qwen2": GGUFArchitecture(_qwen2_config),
    "qwen3": GGUFArchitecture(_qwen3_config),
    "qwen3moe": GGUFArchitecture(_qwen3_moe_config, EXPERT_NAMES),
    "phi3": GGUFArchitecture(_phi3_config, {"ffn_up": "mlp.gate_up_proj"}),
    "gpt-oss": GGUFArchitecture(_gpt_oss_config, _GPT_OSS | EXPERT_NAMES, expert_splits),
    "granitehybrid": GGUFArchitecture(
        _granite_hybrid_config,
        MAMBA2_NAMES | EXPERT_NAMES,
        lambda *_: [LOG_RATES, VECTORS, CONVOLUTIONS],
    ),
    "lfm2": GGUFArchitecture(_lfm2_config, _LFM2, lambda *_: [CONVOLUTIONS]),
    "lfm2moe": GGUFArchitecture(
        _lfm2_moe_config,
        _LFM2 | EXPERT_NAMES,
        lambda *_: [CONVOLUTIONS],
        implied={"expert_gating_func": (_SIGMOID,)},
    ),
    "qwen35": GGUFArchitecture(_qwen3_5_config, _DELTA_NET, _qwen3_5_changes),
    "qwen35moe": GGUFArchitecture(_qwen3_5_moe_config, _DELTA_NET | EXPERT_NAMES, _qwen3_5_changes),
    "qwen3next": GGUFArchitecture(
        _qwen3_next_config, _DELTA_NET | EXPERT_NAMES, _delta_net_changes
    ),
}
"""Key `general.architecture`."""
