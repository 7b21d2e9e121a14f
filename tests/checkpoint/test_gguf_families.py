"""GGUF files of Gemma, Phi, Granite and Nemotron-H, as llama.cpp's converter writes them."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH
from transformers import PreTrainedModel

from legato.checkpoint.gguf import open_gguf_checkpoint
from legato.checkpoint.loader import load_model, open_checkpoint
from legato.core.config import ModelConfig
from legato.core.errors import UnsupportedModelError
from legato.model.decoder import Decoder
from tests.checkpoint.gguf_keys import check_keys
from tests.families.tiny import MODELS, VOCAB_SIZE, Tiny, random_model
from tests.families.tiny_config import FULL, SLIDING
from tests.model.conftest import assert_same_logits, load, reference_logits
from tests.model.dense import packed_logits

from .test_gguf_recurrent import File, Tensors, Values, experts_apart, write_file

PROMPT = [(11 * i + 5 * i * i) % VOCAB_SIZE for i in range(90)]


def plain_metadata(model: PreTrainedModel) -> Values:
    """The metadata of a decoder without experts."""
    config = model.config
    return {
        **sizes(model),
        "rope.freq_base": config.rope_parameters.get("rope_theta"),
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
    }


def sizes(model: PreTrainedModel) -> Values:
    config = model.config
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
    }


def gemma2_metadata(model: PreTrainedModel) -> Values:
    config = model.config
    return plain_metadata(model) | {
        "rope.freq_base": None,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
        "attention.sliding_window": config.sliding_window,
    }


def gemma3_metadata(model: PreTrainedModel) -> Values:
    config = model.config
    full, sliding = (config.rope_parameters[kind] for kind in (FULL, SLIDING))
    return plain_metadata(model) | {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.sliding_window": config.sliding_window,
        "rope.freq_base": full["rope_theta"],
        "rope.freq_base_swa": sliding["rope_theta"],
        "rope.scaling.type": full["rope_type"],
        "rope.scaling.factor": full["factor"],
    }


def gemma4_metadata(model: PreTrainedModel) -> Values:
    config = model.config
    full, sliding = (config.rope_parameters[kind] for kind in (FULL, SLIDING))
    kinds, num_shared = config.layer_types, config.num_kv_shared_layers
    layers = [config.per_layer_config[i] for i in range(len(kinds))]
    head_dims = {kind: layer.head_dim for kind, layer in zip(kinds, layers, strict=True)}
    num_own, width = len(kinds) - num_shared, config.intermediate_size
    num_kv_heads = [layer.num_key_value_heads for layer in layers]
    is_wide = config.use_double_wide_mlp
    metadata = {
        **sizes(model),
        "attention.head_count_kv": num_kv_heads if len({*num_kv_heads}) > 1 else num_kv_heads[0],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "feed_forward_length": (
            [width * (1 + (i >= num_own)) for i in range(len(kinds))] if is_wide else width
        ),
        "attention.shared_kv_layers": num_shared,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == SLIDING for kind in kinds],
        "rope.freq_base": full["rope_theta"],
        "rope.freq_base_swa": sliding["rope_theta"],
        "embedding_length_per_layer_input": getattr(config, "hidden_size_per_layer_input", 0) or 0,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        metadata |= {key: head_dims[FULL], f"{key}_swa": head_dims[SLIDING]}
    if getattr(config, "enable_moe_block", False):
        metadata |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.top_k_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    return metadata


def gemma_tensors(model: PreTrainedModel) -> Tensors:
    """Norms plus 1."""
    return {
        name: tensor + 1 if name.endswith("norm.weight") else tensor
        for name, tensor in without_head(model).items()
    }


def without_head(model: PreTrainedModel) -> Tensors:
    tensors: Tensors = model.state_dict()
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name != "lm_head.weight" or not model.config.tie_word_embeddings
    }


def gemma4_tensors(model: PreTrainedModel) -> Tensors:
    config = model.config
    num_pairs = config.per_layer_config[config.layer_types.index(FULL)].head_dim // 2
    turned = int(config.rope_parameters[FULL]["partial_rotary_factor"] * num_pairs)
    found: Tensors = {
        "rope_freqs.weight": torch.tensor([1.0] * turned + [1e30] * (num_pairs - turned))
    }
    odd = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
    for name, tensor in without_head(model).items():
        layer, _, part = name.partition(".layers.")[2].partition(".")
        if part in odd:
            found[f"blk.{layer}.{odd[part]}"] = tensor
        elif name.endswith(("layer_scalar", "experts.gate_up_proj", "experts.down_proj")):
            found[f"{name}.weight"] = tensor
        else:
            found[name] = tensor
    return found


def phi3_metadata(model: PreTrainedModel) -> Values:
    config, rope = model.config, model.config.rope_parameters
    head_dim = config.hidden_size // config.num_attention_heads
    metadata = plain_metadata(model) | {
        "rope.scaling.original_context_length": rope.get(
            "original_max_position_embeddings", config.max_position_embeddings
        ),
        "rope.dimension_count": int(rope.get("partial_rotary_factor", 1.0) * head_dim),
        "attention.sliding_window": config.sliding_window or 0,
    }
    if "long_factor" in rope:
        original = rope["original_max_position_embeddings"]
        scale = config.max_position_embeddings / original
        metadata["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original))
    return metadata


def phi3_tensors(model: PreTrainedModel) -> Tensors:
    rope = model.config.rope_parameters
    factors = {
        f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"])
        for kind in ("long", "short")
        if f"{kind}_factor" in rope
    }
    return without_head(model) | factors


def granite_metadata(model: PreTrainedModel) -> Values:
    config = model.config
    num_experts = getattr(config, "num_local_experts", 0)
    return plain_metadata(model) | {
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "expert_count": num_experts or None,
        "expert_used_count": config.num_experts_per_tok if num_experts else None,
        "expert_shared_feed_forward_length": getattr(config, "shared_intermediate_size", None),
        "rope.scaling.finetuned": True,
    }


def granite_tensors(model: PreTrainedModel) -> Tensors:
    """Queries and keys in pairs of rows, gates apart."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    end = "_shexp" if getattr(config, "num_local_experts", 0) else ""
    found: Tensors = {}
    for name, tensor in without_head(model).items():
        layer, _, part = name.partition(".layers.")[2].partition(".")
        module = part.rpartition(".")[0].rpartition(".")[2]
        if module in heads:
            halves = tensor.view(heads[module], 2, -1, *tensor.shape[1:])
            found[name] = halves.transpose(1, 2).reshape(tensor.shape)
        elif module == "input_linear":
            gate, up = tensor.chunk(2)
            found[f"blk.{layer}.ffn_gate{end}.weight"] = gate
            found[f"blk.{layer}.ffn_up{end}.weight"] = up
        elif module == "output_linear":
            found[f"blk.{layer}.ffn_down{end}.weight"] = tensor
        elif module == "router":
            found[f"blk.{layer}.ffn_gate_inp.weight"] = tensor
        else:
            found[name] = tensor
    return experts_apart(found)


def nemotron_metadata(model: PreTrainedModel) -> Values:
    config = model.config
    kinds = config.layers_block_type
    has_experts = "moe" in kinds
    width = config.moe_intermediate_size if has_experts else config.intermediate_size
    metadata = sizes(model) | {
        "attention.head_count_kv": [
            config.num_key_value_heads * (kind == "full_attention") for kind in kinds
        ],
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "feed_forward_length": [width * (kind in ("moe", "mlp")) for kind in kinds],
        "rope.dimension_count": config.head_dim,
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.time_step_rank": config.mamba_num_heads,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
    }
    if has_experts:
        metadata |= {
            "expert_count": config.n_routed_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
            "expert_shared_count": 1,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_weights_scale": config.routed_scaling_factor,
            "expert_group_count": config.n_group,
            "moe_latent_size": config.moe_latent_size,
        }
    return metadata


NEMOTRON_NAMES = {
    "norm.weight": "attn_norm.weight",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.conv1d.weight": "ssm_conv1d.weight",
    "mixer.conv1d.bias": "ssm_conv1d.bias",
    "mixer.in_proj.weight": "ssm_in.weight",
    "mixer.in_proj.bias": "ssm_in.bias",
    "mixer.norm.weight": "ssm_norm.weight",
    "mixer.out_proj.weight": "ssm_out.weight",
    "mixer.out_proj.bias": "ssm_out.bias",
    "mixer.up_proj.weight": "ffn_up.weight",
    "mixer.up_proj.bias": "ffn_up.bias",
    "mixer.down_proj.weight": "ffn_down.weight",
    "mixer.down_proj.bias": "ffn_down.bias",
    "mixer.q_proj.weight": "attn_q.weight",
    "mixer.k_proj.weight": "attn_k.weight",
    "mixer.v_proj.weight": "attn_v.weight",
    "mixer.o_proj.weight": "attn_output.weight",
    "mixer.gate.weight": "ffn_gate_inp.weight",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.up_proj": "ffn_up_exps.weight",
    "mixer.experts.down_proj": "ffn_down_exps.weight",
    "mixer.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mixer.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "mixer.fc1_latent_proj.weight": "ffn_latent_down.weight",
    "mixer.fc2_latent_proj.weight": "ffn_latent_up.weight",
}


def nemotron_tensors(model: PreTrainedModel) -> Tensors:
    """Rates and vectors as Granite's."""
    config = model.config
    found: Tensors = {}
    for name, tensor in without_head(model).items():
        layer, _, part = name.partition(".layers.")[2].partition(".")
        rows = tensor
        if part in ("mixer.A_log", "mixer.D"):
            rows = (-tensor.exp() if part.endswith("log") else tensor)[:, None]
        elif part == "mixer.norm.weight":
            rows = tensor.view(config.n_groups, -1)
        elif part == "mixer.conv1d.weight":
            rows = tensor.squeeze(1)
        found[f"blk.{layer}.{NEMOTRON_NAMES[part]}" if part else name] = rows
    return found


def with_predictor(model: PreTrainedModel) -> Values:
    """Another block, which has attention and experts, and predicts further tokens."""
    metadata = nemotron_metadata(model)
    for key in ("attention.head_count_kv", "feed_forward_length"):
        metadata[key] = [*metadata[key], max(metadata[key])]
    return metadata | {"block_count": metadata["block_count"] + 1, "nextn_predict_layers": 1}


def with_predictor_tensors(model: PreTrainedModel) -> Tensors:
    names = ("attn_q.weight", "ffn_up_exps.weight", "nextn.eh_proj.weight")
    last = model.config.num_hidden_layers
    return nemotron_tensors(model) | {f"blk.{last}.{name}": torch.ones(2, 2) for name in names}


def changed(name: str, **settings: Any) -> Tiny:
    return Tiny(MODELS[name].model_type, {**MODELS[name].settings, **settings})


GEMMA3_LAYERS = {"num_hidden_layers": 7, "layer_types": [SLIDING] * 5 + [FULL, SLIDING]}
"""The format does not say the kinds of Gemma 3's layers."""
FILES = {
    "gemma2": File(
        # What the converter does not write has one value.
        changed("gemma2", query_pre_attn_scalar=64),
        MODEL_ARCH.GEMMA2,
        gemma2_metadata,
        gemma_tensors,
    ),
    "gemma3": File(
        changed("gemma3", query_pre_attn_scalar=64, **GEMMA3_LAYERS),
        MODEL_ARCH.GEMMA3,
        gemma3_metadata,
        gemma_tensors,
    ),
    **{
        name: File(MODELS[name], MODEL_ARCH.GEMMA4, gemma4_metadata, gemma4_tensors)
        for name in ("gemma4-e2b", "gemma4-12b", "gemma4-31b", "gemma4-26b-a4b")
    },
    "phi3": File(MODELS["phi3"], MODEL_ARCH.PHI3, phi3_metadata, phi3_tensors),
    "phi4-mini": File(MODELS["phi4-mini"], MODEL_ARCH.PHI3, phi3_metadata, phi3_tensors),
    "granite": File(MODELS["granite"], MODEL_ARCH.GRANITE, granite_metadata, granite_tensors),
    "granite-4": File(MODELS["granite-4"], MODEL_ARCH.GRANITE, granite_metadata, granite_tensors),
    "granite-moe": File(
        MODELS["granite-moe"], MODEL_ARCH.GRANITE_MOE, granite_metadata, granite_tensors
    ),
    "granite-4-moe": File(
        changed("granite-4", num_local_experts=6, num_experts_per_tok=3, intermediate_size=64),
        MODEL_ARCH.GRANITE_MOE,
        granite_metadata,
        granite_tensors,
    ),
    "nemotron-h": File(
        MODELS["nemotron-h"], MODEL_ARCH.NEMOTRON_H, nemotron_metadata, nemotron_tensors
    ),
    "nemotron-3": File(
        changed("nemotron-3", n_group=1, topk_group=1),
        MODEL_ARCH.NEMOTRON_H_MOE,
        with_predictor,
        with_predictor_tensors,
    ),
    "nemotron-3-latent": File(
        changed("nemotron-3-latent", n_group=1, topk_group=1),
        MODEL_ARCH.NEMOTRON_H_MOE,
        nemotron_metadata,
        nemotron_tensors,
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model, path = random_model(FILES[name].tiny), tmp_path / "model.gguf"
    write_file(path, FILES[name], model)
    check_keys(path)
    (logits,) = packed_logits(load(path, "float32"), [PROMPT])
    assert_same_logits(logits, reference_logits(model, PROMPT))


def test_factors_of_longrope_go_by_the_served_length(tmp_path: Path) -> None:
    """Sequences within the length of training have the short ones."""
    file, path = FILES["phi4-mini"], tmp_path / "model.gguf"
    model = random_model(file.tiny)
    write_file(path, file, model)
    served = open_checkpoint(ModelConfig(model=str(path), max_model_len=64))
    prompt = PROMPT[:60]
    own = load_model(served, dtype=torch.float32, device=torch.device("cpu"))
    assert isinstance(own, Decoder)
    (logits,) = packed_logits(own, [prompt])
    assert_same_logits(logits, reference_logits(model, prompt))


def test_fused_projections_of_other_families(tmp_path: Path) -> None:
    """Queries, keys and values as one matrix and one bias, with rows in pairs."""
    file, path = FILES["granite"], tmp_path / "model.gguf"
    model = random_model(file.tiny)
    tensors, fused = granite_tensors(model), {}
    for i in range(model.config.num_hidden_layers):
        for kind in ("weight", "bias"):
            parts = (f"model.layers.{i}.self_attn.{part}_proj.{kind}" for part in "qkv")
            fused[f"blk.{i}.attn_qkv.{kind}"] = torch.cat([tensors.pop(part) for part in parts])
    own = File(file.tiny, file.architecture, file.metadata, lambda _: tensors | fused)
    write_file(path, own, model)
    (logits,) = packed_logits(load(path, "float32"), [PROMPT])
    assert_same_logits(logits, reference_logits(model, PROMPT))


def test_parts_that_are_left_out_are_named(tmp_path: Path) -> None:
    """Predictors of further tokens, and towers that some tools put into the model's file."""
    file, path = FILES["nemotron-3"], tmp_path / "model.gguf"
    towers = {"v.blk.0.attn_q.weight": torch.ones(2, 2), "mm.0.weight": torch.ones(2, 2)}
    own = file._replace(tensors=lambda model: file.tensors(model) | towers)
    write_file(path, own, random_model(file.tiny))
    assert open_gguf_checkpoint(path).unused == ("blk.5 (predicts further tokens)", "mm", "v")
    load(path)


@pytest.mark.parametrize(("name", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_queries_of_the_largest_gemma(name: str, num_layers: int, tmp_path: Path) -> None:
    """Their scale is not in the file."""
    path = tmp_path / "model.gguf"
    write_file(path, FILES[name], random_model(FILES[name].tiny), block_count=num_layers)
    spec = open_gguf_checkpoint(path).decoder_spec
    assert spec.attentions[0].scale == (spec.hidden_size / spec.num_heads) ** -0.5


REFUSALS: dict[str, tuple[str, dict[str, Any], str]] = {
    "other divisors": (
        "gemma4-31b",
        {"rope_freqs.weight": np.linspace(1, 2, 32, dtype=np.float32)},
        "rope_freqs.weight has other values",
    ),
    "values of another size": (
        "gemma4-31b",
        {"attention.value_length_swa": 16},
        "heads with 32 dimensions of keys, 16 of values and 32 that rotate",
    ),
    "no positions": ("granite", {"rope.scaling.finetuned": False}, "Granite without positions"),
    "a block without a network": (
        "nemotron-h",
        {"blk.1.ffn_up.weight": None},
        "block 1 is of no known kind",
    ),
    "one set of factors": (
        "phi4-mini",
        {"rope_factors_short.weight": np.ones(3, np.float32)},
        "longrope has 3 factors for 12 frequencies",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_run_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, changes, message = REFUSALS[case]
    path = tmp_path / "model.gguf"
    write_file(path, FILES[name], random_model(FILES[name].tiny), **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(ModelConfig(model=str(path), max_model_len=64))
