"""GGUF files of models with recurrent layers, as llama.cpp's converter writes them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    get_tensor_name_map,
)
from gguf.quants import dequantize, quantize
from transformers import PreTrainedModel

from legato.checkpoint.loader import open_checkpoint
from legato.core.config import ModelConfig
from legato.core.errors import UnsupportedModelError
from legato.language.tokenizer.gguf_tokenizer import build_gguf_tokenizer
from tests.checkpoint.gguf_keys import check_keys
from tests.checkpoint.gguf_layouts import add
from tests.families.tiny import MODELS, VOCAB_SIZE, Tiny, random_model
from tests.model.conftest import assert_same_logits, load, reference_logits
from tests.model.dense import packed_logits

PROMPT = [(11 * i + 5 * i * i) % VOCAB_SIZE for i in range(90)]
Q8_0 = GGMLQuantizationType.Q8_0
BLOCK = 32
Values = dict[str, Any]
Tensors = dict[str, torch.Tensor]
Change = Callable[[torch.Tensor], torch.Tensor]


class File(NamedTuple):
    """Attributes:
    tiny: a model; architecture: of gguf; metadata, tensors: of a file with the model's weights.
    """

    tiny: Tiny
    architecture: MODEL_ARCH
    metadata: Callable[[PreTrainedModel], Values]
    tensors: Callable[[PreTrainedModel], Tensors]


def common(model: PreTrainedModel) -> Values:
    config = model.config
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }


def experts(model: PreTrainedModel) -> Values:
    config = model.config
    return {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }


def granite_metadata(model: PreTrainedModel) -> Values:
    config = model.config
    has_experts = config.num_local_experts > 0
    return common(model) | {
        "attention.head_count_kv": [
            config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types
        ],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "feed_forward_length": config.intermediate_size,
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        "expert_count": config.num_local_experts if has_experts else None,
        "expert_used_count": config.num_experts_per_tok if has_experts else None,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
    }


def granite_tensors(model: PreTrainedModel) -> Tensors:
    """Queries and keys in pairs of rows, vectors as matrices, gates apart."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    suffix = "_shexp" if config.num_local_experts else ""
    found: Tensors = {}
    for name, tensor in model.state_dict().items():
        layer, _, part = name.partition(".layers.")[2].partition(".")
        module = part.removesuffix(".weight").rpartition(".")[2]
        if module in heads:
            halves = tensor.view(heads[module], 2, -1, tensor.shape[1])
            found[name] = halves.transpose(1, 2).reshape(tensor.shape)
        elif module == "input_linear":
            gate, up = tensor.chunk(2)
            found[f"blk.{layer}.ffn_gate{suffix}.weight"] = gate
            found[f"blk.{layer}.ffn_up{suffix}.weight"] = up
        elif module == "output_linear":
            found[f"blk.{layer}.ffn_down{suffix}.weight"] = tensor
        elif part == "block_sparse_moe.router.weight":
            found[f"blk.{layer}.ffn_gate_inp.weight"] = tensor
        elif part in ("mamba.A_log", "mamba.D"):
            found[name] = (-tensor.exp() if part.endswith("log") else tensor)[:, None]
        elif part == "mamba.norm.weight":
            found[name] = tensor.view(config.mamba_n_groups, -1)
        elif part == "mamba.conv1d.weight":
            found[name] = tensor.squeeze(1)
        else:
            found[name.replace("dt_bias", "dt_proj.bias")] = tensor
    return experts_apart(found)


def without_limits(tiny: Tiny) -> Tiny:
    """The file does not say them."""
    settings = {key: value for key, value in tiny.settings.items() if key != "time_step_limit"}
    return Tiny(tiny.model_type, settings)


def lfm2_metadata(model: PreTrainedModel) -> Values:
    config = model.config
    return common(model) | {
        "attention.head_count_kv": [
            config.num_key_value_heads * (kind != "conv") for kind in config.layer_types
        ],
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "feed_forward_length": model.model.layers[0].feed_forward.w1.out_features,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "shortconv.l_cache": config.conv_L_cache,
    }


def lfm2_moe_metadata(model: PreTrainedModel) -> Values:
    return {
        **lfm2_metadata(model),
        **experts(model),
        "leading_dense_block_count": model.config.num_dense_layers,
        "expert_weights_scale": model.config.routed_scaling_factor,
    }


def lfm2_tensors(model: PreTrainedModel) -> Tensors:
    return experts_apart(
        {
            name.replace("expert_bias", "expert_bias.bias"): (
                tensor.squeeze(1) if name.endswith("conv.conv.weight") else tensor
            )
            for name, tensor in model.state_dict().items()
            if name != "lm_head.weight"
        }
    )


def experts_apart(tensors: Tensors) -> Tensors:
    """Matrices of all experts, gates apart from the others."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        layer = name.partition(".layers.")[2].partition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            found[f"blk.{layer}.ffn_gate_exps.weight"] = gate
            found[f"blk.{layer}.ffn_up_exps.weight"] = up
        elif name.endswith("experts.down_proj"):
            found[f"blk.{layer}.ffn_down_exps.weight"] = tensor
        else:
            found[name] = tensor
    return found


def delta_net_metadata(model: PreTrainedModel) -> Values:
    config = model.config
    rope = config.rope_parameters
    return common(model) | {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
        "rope.dimension_sections": [*rope["mrope_section"], 0],
        "full_attention_interval": 4,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
    }


def with_further_layer(model: PreTrainedModel) -> Values:
    metadata = delta_net_metadata(model)
    return metadata | {"block_count": metadata["block_count"] + 1, "nextn_predict_layers": 1}


def delta_net_tensors(model: PreTrainedModel, changes: Mapping[str, Change]) -> Tensors:
    """Rates, norms plus 1, and tensors of delta nets in another order.

    Args:
        changes: key a tensor of a delta net.
    """
    tensors: Tensors = {}
    for name, tensor in model.state_dict().items():
        part = name.partition(".linear_attn.")[2]
        rows = tensor.squeeze(1) if part == "conv1d.weight" else tensor
        if part == "A_log":
            rows = -rows.exp()
        if name.endswith("norm.weight") and part != "norm.weight":
            rows = rows + 1
        if name != "lm_head.weight" or not model.config.tie_word_embeddings:
            stored = name.replace("dt_bias", "dt_proj.bias")
            tensors[stored] = changes[part](rows) if part in changes else rows
    return experts_apart(tensors)


def qwen3_5_tensors(model: PreTrainedModel) -> Tensors:
    config = model.config
    num_keys, num_heads = config.linear_num_key_heads, config.linear_num_value_heads
    shared, size = num_heads // num_keys, config.linear_value_head_dim
    first = 2 * num_keys * config.linear_key_head_dim

    def apart(rows: torch.Tensor, size: int) -> torch.Tensor:
        """The first value head of each key head, then the second of each."""
        order = [
            (key * shared + value) * size + i
            for value in range(shared)
            for key in range(num_keys)
            for i in range(size)
        ]
        return rows[order]

    def with_values(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows[:first], apart(rows[first:], size)])

    by_head = dict.fromkeys(
        ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"), lambda rows: apart(rows, 1)
    )
    return delta_net_tensors(
        model,
        {
            **by_head,
            "in_proj_qkv.weight": with_values,
            "conv1d.weight": with_values,
            "in_proj_z.weight": lambda rows: apart(rows, size),
            "out_proj.weight": lambda rows: apart(rows.T, size).T,
        },
    )


def with_further_tensors(model: PreTrainedModel) -> Tensors:
    """As `qwen3_5_tensors`, with a predictor of further tokens."""
    further = {"blk.4.attn_q.weight": torch.ones(2, 2), "blk.4.nextn.eh_proj.weight": torch.ones(3)}
    return qwen3_5_tensors(model) | further


def qwen3_next_tensors(model: PreTrainedModel) -> Tensors:
    """Queries, keys and values of all heads, apart from the gates of outputs."""
    config = model.config
    num_keys = config.linear_num_key_heads
    num_values = config.linear_num_value_heads // num_keys * config.linear_value_head_dim
    sizes = [config.linear_key_head_dim] * 2 + [num_values] * 2
    tensors: Tensors = {}
    for name, tensor in delta_net_tensors(model, {}).items():
        if not name.endswith("in_proj_qkvz.weight"):
            tensors[name] = tensor
            continue
        parts = tensor.view(num_keys, sum(sizes), -1).split(sizes, dim=1)
        *qkv, gates = (part.flatten(0, 1) for part in parts)
        layer = name.split(".")[2]
        tensors[f"blk.{layer}.attn_qkv.weight"] = torch.cat(qkv)
        tensors[f"blk.{layer}.attn_gate.weight"] = gates
    return tensors


FILES = {
    "granite-4-h": File(
        without_limits(MODELS["granite-4-h"]),
        MODEL_ARCH.GRANITE_HYBRID,
        granite_metadata,
        granite_tensors,
    ),
    "granite-4-h-moe": File(
        without_limits(MODELS["granite-4-h-moe"]),
        MODEL_ARCH.GRANITE_HYBRID,
        granite_metadata,
        granite_tensors,
    ),
    "lfm2": File(MODELS["lfm2"], MODEL_ARCH.LFM2, lfm2_metadata, lfm2_tensors),
    "lfm2-moe": File(MODELS["lfm2-moe"], MODEL_ARCH.LFM2MOE, lfm2_moe_metadata, lfm2_tensors),
    "qwen3.5": File(MODELS["qwen3.5"], MODEL_ARCH.QWEN35, with_further_layer, with_further_tensors),
    "qwen3.5-moe": File(
        MODELS["qwen3.5-moe"],
        MODEL_ARCH.QWEN35MOE,
        lambda model: delta_net_metadata(model) | experts(model),
        qwen3_5_tensors,
    ),
    "qwen3-next": File(
        MODELS["qwen3-next"],
        MODEL_ARCH.QWEN3NEXT,
        lambda model: delta_net_metadata(model) | experts(model),
        qwen3_next_tensors,
    ),
}


def write(path: Path, name: str, model: PreTrainedModel, **changes: Any) -> None:
    write_file(path, FILES[name], model, **changes)


def write_file(path: Path, file: File, model: PreTrainedModel, **changes: Any) -> None:
    """Write a file, with matrices in Q8_0 where `model` has such values.

    Args:
        changes: of the metadata, or of tensors by their names in the file; None leaves one out.
    """
    architecture = MODEL_ARCH_NAMES[file.architecture]
    writer = GGUFWriter(path, architecture)
    metadata = file.metadata(model)
    names = get_tensor_name_map(file.architecture, metadata["block_count"])
    tensors: Values = {
        names.get_name(stored, try_suffixes=(".weight", ".bias")) or stored: tensor.numpy()
        for stored, tensor in file.tensors(model).items()
    }
    for key, change in changes.items():
        (tensors if key in tensors else metadata)[key] = change
    add_metadata(writer, architecture, metadata)
    for key, values in tensors.items():
        if values is None:
            continue
        rows = np.ascontiguousarray(values)
        if is_matrix(rows) and np.array_equal(rows, rounded(rows)):
            writer.add_tensor(key, quantize(rows, Q8_0), raw_dtype=Q8_0)
        else:
            writer.add_tensor(key, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: GGUFWriter, architecture: str, metadata: Mapping[str, Any]) -> None:
    for key, value in metadata.items():
        add(writer, f"{architecture}.{key}", value)


def is_matrix(rows: np.ndarray) -> bool:
    return rows.ndim > 1 and rows.shape[-1] % BLOCK == 0


def rounded(rows: np.ndarray) -> np.ndarray:
    values: np.ndarray = dequantize(quantize(rows, Q8_0), Q8_0)
    return values


def whole_steps(values: torch.Tensor) -> torch.Tensor:
    """Round values so that Q8_0 has them, even with whole eighths of a block in another order."""
    step = 2.0 ** float((values.abs().max() / 127).log2().round())
    codes = (values / step).round().clamp(-127, 127)
    codes[..., ::8] = torch.copysign(torch.tensor(127.0), codes[..., ::8])
    return codes * step


@pytest.mark.parametrize("name", FILES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model, path = random_model(FILES[name].tiny), tmp_path / "model.gguf"
    write(path, name, model)
    check_keys(path)
    (logits,) = packed_logits(load(path, "float32"), [PROMPT])
    assert_same_logits(logits, reference_logits(model, PROMPT))


@pytest.mark.parametrize("value_dim", [24, 32])
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe"])
def test_quantized_matrices_are_reordered(name: str, value_dim: int, tmp_path: Path) -> None:
    """Whole blocks of columns move; matrices with cut blocks are widened."""
    tiny = FILES[name].tiny
    settings = {**tiny.settings, "linear_value_head_dim": value_dim}
    model = random_model(Tiny(tiny.model_type, settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if is_matrix(parameter.numpy()):
                parameter.copy_(whole_steps(parameter))
    path = tmp_path / "model.gguf"
    write(path, name, model)
    assert open_checkpoint(ModelConfig(model=str(path))).quantization == "Q8_0"
    (logits,) = packed_logits(load(path, "float32"), [PROMPT])
    assert_same_logits(logits, reference_logits(model, PROMPT))


REFUSALS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no heads": ("lfm2", {"attention.head_count_kv": [0, 0, 0, 0]}, "head_count_kv is 0"),
    "a window": ("lfm2", {"attention.sliding_window": 7}, "a sliding window is not supported"),
    "no kernel": ("lfm2", {"shortconv.l_cache": None}, "lacks 'lfm2.shortconv.l_cache'"),
    "too many heads": (
        "lfm2",
        {"attention.head_count_kv": [0, 4, 0, 0]},
        "layers.1.self_attn.k_proj.weight has shape",
    ),
    "a truncated convolution": (
        "lfm2",
        {"blk.2.shortconv.conv.weight": np.ones((9, 3), np.float32)},
        r"layers.2.recurrence.conv.weight has shape \(9, 1, 3\)",
    ),
    "a missing convolution": (
        "lfm2",
        {"blk.2.shortconv.conv.weight": None},
        "unexpected tensor model.layers.2.recurrence",
    ),
    "more layers of others": ("qwen3.5", {"nextn_predict_layers": 5}, "nextn_predict_layers is 5"),
    "no value heads": ("qwen3.5", {"ssm.time_step_rank": 0}, "cannot read"),
    "uneven heads": ("qwen3.5", {"ssm.group_count": 3}, "4 value heads cannot share 3 key heads"),
    "too much rope": ("qwen3.5", {"rope.dimension_count": 128}, "rope on 128 of 64 dimensions"),
    "truncated experts": (
        "lfm2-moe",
        {"blk.1.ffn_up_exps.weight": np.ones((6, 63, 128), np.float32)},
        r"layers.1.mlp.experts.up_proj.weight has shape \(6, 63, 128\)",
    ),
    "no expert for all tokens": (
        "qwen3.5-moe",
        {f"blk.{i}.ffn_up_shexp.weight": None for i in range(4)},
        "shared_size is 0",
    ),
    "rope": ("granite-4-h", {"rope.scaling.finetuned": 1}, "rope beside recurrent layers"),
    "no scale": ("granite-4-h", {"attention.scale": None}, "lacks 'granitehybrid.attention.scale'"),
    "truncated rates": (
        "qwen3.5",
        {"blk.1.ssm_a": np.ones(3, np.float32)},
        r"layers.1.recurrence.A_log has shape \(3,\)",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_run_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, changes, message = REFUSALS[case]
    path = tmp_path / "model.gguf"
    write(path, name, random_model(FILES[name].tiny), **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        load(path)


def test_rope_on_a_part_of_a_head_is_for_those_families_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "lfm2", random_model(FILES["lfm2"].tiny), **{"rope.dimension_count": 16})
    with pytest.raises(UnsupportedModelError, match="only a part of each head"):
        load(path)


def test_marks_stay_with_their_letters() -> None:
    """Qwen3.5's pieces are Qwen2's but for combining marks."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.merges": [],
    }
    pieces = {}
    for name in ("qwen2", "qwen35"):
        tokenizer, _ = build_gguf_tokenizer(metadata | {"tokenizer.ggml.pre": name})
        split = tokenizer.pre_tokenizer.pre_tokenize_str
        pieces[name] = len(split("สวัสดี 12 it's\u0e35!"))
    assert pieces["qwen35"] < pieces["qwen2"]
