"""Opens checkpoints in llama.cpp's format: one GGUF file."""

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from legato.checkpoint.base import Checkpoint
from legato.checkpoint.gguf_blocks import SPLIT_TYPES
from legato.checkpoint.gguf_file import GGUFFile, GGUFTensor
from legato.core.errors import UnsupportedModelError
from legato.core.validation import check_sizes, refusing_what_fails
from legato.model.architectures import described
from legato.model.base import NamedWeights
from legato.model.quantization import QuantizedWeight
from legato.model.spec import DecoderSpec

_SIZES = (
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
)
logger = logging.getLogger(__name__)

_FLOAT_TYPES = {"F64", "F32", "F16", "BF16"}
_ROPE_FACTORS = "rope_freqs.weight"
_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_GPT_OSS_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
}
_EXPERT_NAMES = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
"""Tensors with a part for each expert."""
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def open_gguf_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file. Weights of the types that `split_blocks` knows stay quantized.

    Raises:
        UnsupportedModelError: the file is broken, or Legato cannot run the model.
    """
    file = GGUFFile(path)
    if file.architecture not in _CONFIGS:
        raise UnsupportedModelError(
            f"unsupported GGUF architecture {file.architecture!r}; Legato supports "
            + ", ".join(_CONFIGS)
        )
    places = dict(_places(file))
    tensors = {name: file.tensor(*place) for name, place in places.items()}
    check_sizes(path, file.get("block_count"), **{name: file.get(name) for name in _SIZES})
    with refusing_what_fails(path):
        contents = _CONFIGS[file.architecture](file)
        _, spec = described(contents)
    return Checkpoint(
        name=path.name,
        spec=spec,
        dtype=torch.bfloat16,
        shapes={name: tensor.shape for name, tensor in tensors.items()},
        tensors=partial(_read_tensors, file, spec, places),
        architecture=contents["architectures"][0],
        quantization=_quantization(file),
        kept_bytes={name: _kept_bytes(tensor) for name, tensor in tensors.items()},
    )


def _quantization(file: GGUFFile) -> str:
    """Return the types of the quantized matrices, the most common first."""
    types = Counter(t.type.name for t in file.tensors.values() if t.type.name not in _FLOAT_TYPES)
    return ", ".join(name for name, _ in types.most_common())


def _kept_bytes(tensor: GGUFTensor) -> int:
    is_kept = tensor.type in SPLIT_TYPES and len(tensor.shape) == 2
    return tensor.num_bytes if is_kept else math.prod(tensor.shape) * torch.bfloat16.itemsize


def _llama_config(file: GGUFFile) -> dict[str, Any]:
    """Describe a Llama, Mistral or Mixtral model; all are named "llama".

    Only Mistral has a window, and only Mixtral has experts.
    """
    window = file.get("attention.sliding_window")
    if file.get("expert_count"):
        return {
            **_common_config(file),
            **_experts(file),
            "architectures": ["MixtralForCausalLM"],
            "sliding_window": window,
        }
    if window:
        return {
            **_common_config(file),
            "architectures": ["MistralForCausalLM"],
            "sliding_window": window,
        }
    return {
        **_common_config(file),
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }


def _qwen2_config(file: GGUFFile) -> dict[str, Any]:
    _refuse_window(file)
    return {**_common_config(file), "architectures": ["Qwen2ForCausalLM"]}


def _qwen3_config(file: GGUFFile) -> dict[str, Any]:
    _refuse_window(file)
    return {
        **_common_config(file),
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def _qwen3_moe_config(file: GGUFFile) -> dict[str, Any]:
    _refuse_window(file)
    return {
        **_common_config(file),
        **_experts(file),
        "architectures": ["Qwen3MoeForCausalLM"],
        # The format does not say; all published models have it.
        "norm_topk_prob": True,
    }


def _gpt_oss_config(file: GGUFFile) -> dict[str, Any]:
    common = _common_config(file)
    return {
        **common,
        **_experts(file),
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "sliding_window": file.metadata[f"{file.architecture}.attention.sliding_window"],
        "rope_parameters": {**common["rope_parameters"], "truncate": False},
    }


def _experts(file: GGUFFile) -> dict[str, Any]:
    return {
        "num_local_experts": file.get("expert_count"),
        "num_experts_per_tok": file.get("expert_used_count"),
        "moe_intermediate_size": file.get("expert_feed_forward_length"),
    }


# Key `general.architecture`, value the function that turns metadata into fields of config.json.
_CONFIGS: dict[str, Callable[[GGUFFile], dict[str, Any]]] = {
    "llama": _llama_config,
    "qwen2": _qwen2_config,
    "qwen3": _qwen3_config,
    "qwen3moe": _qwen3_moe_config,
    "gpt-oss": _gpt_oss_config,
}


def _common_config(file: GGUFFile) -> dict[str, Any]:
    metadata, prefix = file.metadata, file.architecture
    hidden_size = metadata[f"{prefix}.embedding_length"]
    num_heads = metadata[f"{prefix}.attention.head_count"]
    head_dim = file.get("attention.key_length", hidden_size // num_heads)
    if not head_dim == file.get("attention.value_length", head_dim) == _rope_size(file, head_dim):
        raise UnsupportedModelError(
            f"{file.path}: keys, values and rope of different sizes are not supported"
        )
    return {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": metadata[f"{prefix}.feed_forward_length"],
        "num_hidden_layers": metadata[f"{prefix}.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata[f"{prefix}.attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": metadata[f"{prefix}.context_length"],
        "rope_parameters": _rope_parameters(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def _rope_size(file: GGUFFile, head_dim: int) -> int:
    return int(file.get("rope.dimension_count", head_dim))


def _rope_parameters(file: GGUFFile) -> dict[str, Any]:
    """Return rope parameters; Llama 3's tensor of divisors becomes LongRoPE with one factor set."""
    context_length = file.get("context_length")
    original_length = file.get("rope.scaling.original_context_length", context_length)
    parameters: dict[str, Any] = {"rope_theta": file.get("rope.freq_base", 10000.0)}
    scaling = file.get("rope.scaling.type", "none")
    if _ROPE_FACTORS in file.tensors:
        factors = file.read(_ROPE_FACTORS).tolist()
        return parameters | {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context_length,
        }
    if scaling == "none":
        return parameters | {"rope_type": "default"}
    if scaling not in ("linear", "yarn"):
        raise UnsupportedModelError(f"{file.path}: unsupported rope scaling {scaling!r}")
    parameters |= {"rope_type": scaling, "factor": file.get("rope.scaling.factor", 1.0)}
    if scaling == "yarn":
        parameters["original_max_position_embeddings"] = original_length
    return parameters


def _refuse_window(file: GGUFFile) -> None:
    # The format does not say which layers have the window.
    if file.get("attention.sliding_window"):
        raise UnsupportedModelError(
            f"{file.path}: a sliding window is not supported for {file.architecture!r} GGUF files"
        )


Place = tuple[str, int | None]
"""Name of a tensor in the file, and a part of it; None for all of it."""


def _places(file: GGUFFile) -> Iterator[tuple[str, Place]]:
    """Yield the name of each weight, and where it is; a layer's experts are parts of one tensor."""
    num_experts = file.get("expert_count")
    for name, tensor in file.tensors.items():
        match = _LAYER_TENSOR.fullmatch(name)
        module = _EXPERT_NAMES.get(match[2]) if match else None
        if match and module and tensor.shape[:1] == (num_experts,):
            for expert in range(tensor.shape[0]):
                own = f"model.layers.{match[1]}.mlp.experts.{expert}.{module}.{match[3]}"
                yield own, (name, expert)
        elif name != _ROPE_FACTORS:
            yield _transformers_name(name, file.architecture), (name, None)


def _read_tensors(
    file: GGUFFile, spec: DecoderSpec, places: Mapping[str, Place], _: torch.device
) -> NamedWeights:
    heads = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads}
    _log_widened(file)
    for name, place in places.items():
        tensor = _read_quantized(file, place) or torch.from_numpy(file.read(*place))
        match = _LAYER_TENSOR.fullmatch(place[0])
        if match and match[2] in heads and file.architecture == "llama":
            undo = partial(_undo_interleaving, num_heads=heads[match[2]])
            tensor = tensor.map(undo) if isinstance(tensor, QuantizedWeight) else undo(tensor)
        yield name, tensor


def _log_widened(file: GGUFFile) -> None:
    """Name the types of matrices that have codes, but not in a form that stays quantized."""
    names = {tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    widened = sorted(names - _FLOAT_TYPES - {kind.name for kind in SPLIT_TYPES})
    if widened:
        logger.warning("%s: weights of type %s are widened", file.path, ", ".join(widened))


def _read_quantized(file: GGUFFile, place: Place) -> QuantizedWeight | None:
    shape = file.tensor(*place).shape
    blocks = file.read_blocks(*place) if len(shape) == 2 else None
    if blocks is None:
        return None
    codes, scales, minima = (
        None if part is None else torch.from_numpy(part).reshape(shape[0], -1)
        for part in blocks[:3]
    )
    assert codes is not None
    assert scales is not None
    table = None if blocks.table is None else torch.from_numpy(blocks.table)
    return QuantizedWeight(codes, scales, minima, blocks.bits, zero=blocks.zero, table=table)


def _transformers_name(name: str, architecture: str) -> str:
    """Return transformers' name of a tensor; an unknown name stays, for the loader to reject."""
    match = _LAYER_TENSOR.fullmatch(name)
    names = _LAYER_NAMES | (_GPT_OSS_NAMES if architecture == "gpt-oss" else {})
    if match and match[2] in names:
        own = f"model.layers.{match[1]}.{names[match[2]]}"
        return own if own.endswith(".sinks") else f"{own}.{match[3]}"
    stem, _, suffix = name.rpartition(".")
    return f"{_GLOBAL_NAMES[stem]}.{suffix}" if stem in _GLOBAL_NAMES else name


def _undo_interleaving(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder rows: llama.cpp rotates rows (2i, 2i + 1) of a head, transformers (i, i + D / 2).

    Args:
        tensor: [num_heads * D, ...] weight or bias of queries or keys.
    """
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
