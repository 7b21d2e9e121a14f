"""GGUF files of many families, with the layout of llama.cpp's converter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import dequantize, quantize
from transformers import PreTrainedModel

from legato.core.errors import UnsupportedModelError
from tests.checkpoint.gguf_keys import check_keys
from tests.checkpoint.gguf_layouts import (
    LLAMA4,
    SIGMOID,
    SOFTMAX,
    Change,
    Values,
    add,
    common,
    deepseek,
    gpt_neox,
    halved,
    heads_apart,
    llama4,
    mixture,
    old_deepseek,
    paired,
    parts_apart,
    rope_size,
    sized,
    unchanged,
    window,
    with_factors,
)
from tests.families.tiny import _ROUTED, MODELS, _yarn, random_model
from tests.families.tiny_config import FULL, SLIDING, VOCAB_SIZE, Tiny
from tests.model.conftest import assert_same_logits, load, reference_logits
from tests.model.dense import packed_logits

PROMPT = [(11 * i + 5 * i * i) % VOCAB_SIZE for i in range(90)]
Q8_0 = GGMLQuantizationType.Q8_0


class Family(NamedTuple):
    """Attributes:
    tiny: a name in `MODELS`, or a model.
    metadata: further keys, or keys with another value; None leaves one out.
    change: of each tensor.
    fused: "qkv" or "experts", projections that are one tensor.
    experts: changes all experts' weights of a kind.
    """

    tiny: str | Tiny
    architecture: MODEL_ARCH
    metadata: Callable[[Any], Values] = lambda _: {}
    change: Change = unchanged
    fused: tuple[str, ...] = ()
    experts: Callable[[torch.Tensor], torch.Tensor] = lambda own: own


LONG = {**MODELS["minicpm3"].settings["rope_parameters"], "original_max_position_embeddings": 512}
"""LongRoPE of 16 rotated dimensions, without a longer context."""

FAMILIES = {
    "mistral3": Family(
        "ministral3",
        MODEL_ARCH.MISTRAL3,
        lambda config: {
            **rope_size()(config),
            "rope.scaling.yarn_log_multiplier": config.rope_parameters["mscale_all_dim"],
            "attention.temperature_scale": config.rope_parameters["llama_4_scaling_beta"],
        },
        paired,
    ),
    "smollm3": Family("smollm3", MODEL_ARCH.SMOLLM3, rope_size(), paired),
    "internlm2": Family(Tiny("llama"), MODEL_ARCH.INTERNLM2, change=paired),
    "exaone": Family(Tiny("llama"), MODEL_ARCH.EXAONE, rope_size()),
    "minicpm": Family(
        Tiny("granite", {**MODELS["granite"].settings, "attention_multiplier": 32**-0.5}),
        MODEL_ARCH.MINICPM,
        lambda config: {
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "logit_scale": config.logits_scaling,
        },
        paired,
    ),
    "minicpm4": Family(
        Tiny(
            "granite",
            {"num_attention_heads": 8, "attention_multiplier": 0.25, "rope_parameters": LONG},
        ),
        MODEL_ARCH.MINICPM,
        lambda _: {
            "rope.scaling.type": "longrope",
            "embedding_scale": 1.0,
            "residual_scale": 1.0,
            "logit_scale": 1.0,
        },
        paired,
    ),
    "arcee": Family("arcee", MODEL_ARCH.ARCEE, rope_size(), paired),
    "olmo2": Family("olmo2", MODEL_ARCH.OLMO2),
    "olmo3": Family("olmo3", MODEL_ARCH.OLMO2, window),
    "olmo3-temperature": Family(
        Tiny(
            "olmo3",
            {
                **MODELS["olmo3"].settings,
                "rope_parameters": {
                    FULL: _yarn(attention_factor=1.4),
                    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
                },
            },
        ),
        MODEL_ARCH.OLMO2,
        lambda config: {**window(config), "rope.scaling.yarn_attn_factor": 1.4},
    ),
    "exaone4": Family("exaone4", MODEL_ARCH.EXAONE4, window),
    "exaone4-small": Family("exaone4-small", MODEL_ARCH.EXAONE4),
    "glm4": Family("glm4", MODEL_ARCH.GLM4, rope_size(0.5)),
    "glm4v": Family(
        "glm4",
        MODEL_ARCH.GLM4,
        lambda config: {**rope_size(0.5)(config), "rope.dimension_sections": [8, 12, 12, 0]},
        halved,
    ),
    "seed-oss": Family("seed-oss", MODEL_ARCH.SEED_OSS),
    "ernie4.5": Family("ernie4.5", MODEL_ARCH.ERNIE4_5),
    "hunyuan": Family(
        "hunyuan",
        MODEL_ARCH.HUNYUAN_DENSE,
        lambda config: {
            "rope.freq_base": 1e4 * 1000 ** (config.head_dim / (config.head_dim - 2)),
            "rope.scaling.type": "none",
            "rope.scaling.factor": 1.0,
        },
    ),
    "cohere2": Family(
        "cohere2",
        MODEL_ARCH.COHERE2,
        lambda config: {
            **rope_size()(config),
            "attention.sliding_window": config.sliding_window,
            "logit_scale": config.logit_scale,
            "vocab_size": config.vocab_size,
        },
    ),
    "starcoder2": Family(Tiny("starcoder2", {"sliding_window": None}), MODEL_ARCH.STARCODER2),
    "gpt-neox": Family(
        "gpt-neox",
        MODEL_ARCH.GPTNEOX,
        lambda config: gpt_neox(config, is_parallel=True),
        parts_apart,
    ),
    "gpt-neox-sequential": Family(
        "gpt-neox-sequential",
        MODEL_ARCH.GPTNEOX,
        lambda config: gpt_neox(config, is_parallel=False),
        parts_apart,
    ),
    "apertus": Family("apertus", MODEL_ARCH.APERTUS, rope_size()),
    "falcon-h1": Family(
        "falcon-h1",
        MODEL_ARCH.FALCON_H1,
        lambda config: {
            "ssm.conv_kernel": config.mamba_d_conv,
            "ssm.state_size": config.mamba_d_state,
            "ssm.group_count": config.mamba_n_groups,
            "ssm.time_step_rank": config.mamba_n_heads,
            "ssm.inner_size": config.mamba_d_ssm,
        },
        with_factors,
    ),
    "qwen2vl": Family(
        Tiny("qwen2"),
        MODEL_ARCH.QWEN2VL,
        lambda _: {"rope.dimension_sections": [4, 6, 6, 0]},
    ),
    "qwen3vl": Family(
        "qwen3",
        MODEL_ARCH.QWEN3VL,
        lambda _: {"rope.dimension_sections": [12, 10, 10, 0], "n_deepstack_layers": 3},
    ),
    "qwen2-moe": Family(
        Tiny(
            "qwen2_moe",
            {
                key: value
                for key, value in MODELS["qwen2-moe"].settings.items()
                if "window" not in key
            },
        ),
        MODEL_ARCH.QWEN2MOE,
        lambda config: (
            sized(config)
            | {"expert_shared_feed_forward_length": config.shared_expert_intermediate_size}
        ),
    ),
    "olmoe": Family("olmoe", MODEL_ARCH.OLMOE),
    "llama4": Family(LLAMA4, MODEL_ARCH.LLAMA4, llama4, experts=lambda own: own.mT),
    "minimax-m2": Family(
        "minimax-m2",
        MODEL_ARCH.MINIMAXM2,
        lambda config: {
            **rope_size(0.5)(config),
            "expert_feed_forward_length": config.intermediate_size,
            "expert_gating_func": SIGMOID,
        },
    ),
    "hunyuan-moe": Family(
        "hunyuan-moe",
        MODEL_ARCH.HUNYUAN_MOE,
        lambda config: {
            "expert_feed_forward_length": config.intermediate_size,
            "expert_shared_feed_forward_length": config.intermediate_size,
        },
    ),
    "ernie4.5-moe": Family(
        "ernie4.5-moe",
        MODEL_ARCH.ERNIE4_5_MOE,
        lambda config: {
            **sized(config),
            "expert_count": config.moe_num_experts,
            "expert_used_count": config.moe_k,
            "expert_shared_count": config.moe_num_shared_experts,
            "expert_shared_feed_forward_length": 128,
            "interleave_moe_layer_step": config.moe_layer_interval,
            "leading_dense_block_count": config.moe_layer_start_index,
        },
    ),
    "glm4-moe": Family(
        "glm4-moe",
        MODEL_ARCH.GLM4_MOE,
        lambda config: {
            **rope_size(0.5)(config),
            **mixture(config),
            "expert_gating_func": SIGMOID,
            "nextn_predict_layers": 1,
            "block_count": config.num_hidden_layers + 1,
        },
    ),
    "dots1": Family(
        Tiny("dots1", {**_ROUTED, "num_hidden_layers": 3, "head_dim": 64}),
        MODEL_ARCH.DOTS1,
        lambda config: {**mixture(config), "expert_gating_func": SIGMOID},
    ),
    "ling-2": Family(
        Tiny("glm4_moe", {**MODELS["glm4-moe"].settings, "attention_bias": False}),
        MODEL_ARCH.BAILINGMOE2,
        lambda config: {
            **rope_size(0.5)(config),
            **mixture(config),
            "expert_gating_func": SIGMOID,
            "expert_shared_feed_forward_length": 64,
        },
        fused=("qkv",),
    ),
    "deepseek-v2": Family(
        Tiny(
            "deepseek_v2",
            {
                **MODELS["deepseek-v2"].settings,
                "rope_parameters": _yarn(mscale=0.707, mscale_all_dim=0.707),
            },
        ),
        MODEL_ARCH.DEEPSEEK2,
        deepseek,
        heads_apart,
    ),
    "deepseek-v2-lite": Family(
        Tiny(
            "deepseek_v2",
            {**MODELS["deepseek-v2-lite"].settings, "n_group": 1, "topk_group": 1},
        ),
        MODEL_ARCH.DEEPSEEK2,
        old_deepseek,
    ),
    "deepseek-v3": Family(
        "deepseek-v3",
        MODEL_ARCH.DEEPSEEK2,
        lambda config: {**deepseek(config), "expert_gating_func": SIGMOID},
        heads_apart,
    ),
    "glm4.7-flash": Family(
        Tiny(
            "glm4_moe_lite",
            {
                **MODELS["glm4-moe-lite"].settings,
                "mlp_layer_types": ["dense", "sparse", "sparse"],
                "rope_interleave": True,
            },
        ),
        MODEL_ARCH.DEEPSEEK2,
        lambda config: {**deepseek(config), "leading_dense_block_count": 1},
        heads_apart,
    ),
    "mistral4": Family(
        "mistral4",
        MODEL_ARCH.MISTRAL4,
        lambda config: {
            **deepseek(config),
            "attention.temperature_length": 64,
            "attention.temperature_scale": config.rope_parameters["llama_4_scaling_beta"],
        },
        heads_apart,
        fused=("experts",),
    ),
    "mistral-large-3": Family(
        "mistral4",
        MODEL_ARCH.DEEPSEEK2,
        lambda config: {
            **deepseek(config),
            "expert_gating_func": SOFTMAX,
            "attention.temperature_scale": config.rope_parameters["llama_4_scaling_beta"],
            "attention.temperature_length": 64,
        },
        heads_apart,
    ),
    "youtu": Family("youtu", MODEL_ARCH.DEEPSEEK2, deepseek, heads_apart),
    "minicpm3": Family(
        Tiny(
            "minicpm3",
            {
                **MODELS["minicpm3"].settings,
                "dim_model_base": 256,
                "v_head_dim": 32,
                "rope_parameters": LONG,
            },
        ),
        MODEL_ARCH.MINICPM3,
        lambda config: {
            "attention.q_lora_rank": config.q_lora_rank,
            "attention.kv_lora_rank": config.kv_lora_rank,
            "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
            "attention.value_length": None,
            "rope.dimension_count": config.qk_rope_head_dim,
        },
    ),
}


def tensors_of(model: PreTrainedModel, family: Family) -> dict[str, torch.Tensor]:
    """Return the tensors with the published names, experts of a kind as one."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        name = name.replace("gate.moe_statics", "moe_statics")
        parent, _, part = name.rpartition(".experts.")
        if part == "gate_up_proj" and "experts" not in family.fused:
            gate, up = family.experts(tensor).chunk(2, dim=1)
            found |= {f"{parent}.experts.gate_proj.weight": gate}
            found |= {f"{parent}.experts.up_proj.weight": up}
        elif part in ("gate_up_proj", "down_proj"):
            found[f"{name}.weight"] = family.experts(tensor)
        else:
            found |= family.change(name, tensor, model.config)
    if "qkv" in family.fused:
        for i in range(model.config.num_hidden_layers):
            parent = f"model.layers.{i}"
            parts = [found.pop(f"{parent}.self_attn.{part}_proj.weight") for part in "qkv"]
            found[f"{parent}.attention.query_key_value.weight"] = torch.cat(parts)
    return found


def write(
    path: Path,
    family: Family,
    model: PreTrainedModel,
    *,
    is_quantized: bool = False,
    **changes: Any,
) -> None:
    """Write a file.

    Args:
        is_quantized: write matrices in Q8_0, and give the model the values that they then have. It
            needs a `change` that returns views.
        changes: of the metadata; None leaves a key out.
    """
    architecture = MODEL_ARCH_NAMES[family.architecture]
    writer = GGUFWriter(path, architecture)
    metadata = common(model.config) | family.metadata(model.config) | changes
    for key, value in metadata.items():
        add(writer, f"{architecture}.{key}", value)
    names = get_tensor_name_map(family.architecture, metadata["block_count"])
    for name, rows in tensors_of(model, family).items():
        if ".act_fn." in name:
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        values = np.ascontiguousarray(rows.numpy())
        if is_quantized and values.ndim > 1 and values.shape[-1] % 32 == 0:
            packed = quantize(values, Q8_0)
            rows.copy_(torch.from_numpy(dequantize(packed, Q8_0)))
            writer.add_tensor(stored, packed, raw_dtype=Q8_0)
        else:
            writer.add_tensor(stored, values)
    add_unmapped(writer, family, model, metadata)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_unmapped(
    writer: GGUFWriter, family: Family, model: PreTrainedModel, metadata: Values
) -> None:
    """Add a predictor of further tokens, factors of rope, and weights that are metadata."""
    if metadata.get("nextn_predict_layers"):
        place = f"blk.{model.config.num_hidden_layers}"
        writer.add_tensor(f"{place}.nextn.eh_proj.weight", np.ones((2, 2), np.float32))
        writer.add_tensor(f"{place}.attn_q.weight", np.ones((2, 2), np.float32))
    for kind in ("long", "short"):
        if f"{kind}_factor" in model.config.rope_parameters:
            factors = np.array(model.config.rope_parameters[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    if model.config.rope_parameters.get("rope_type") == "llama3":
        stretched = model.model.rotary_emb.inv_freq
        powers = torch.arange(len(stretched)) / len(stretched)
        plain = model.config.rope_parameters["rope_theta"] ** -powers
        writer.add_tensor("rope_freqs.weight", (plain / stretched).numpy())
    if family.architecture == MODEL_ARCH.APERTUS:
        for key in ("alpha_p", "alpha_n", "beta", "eps"):
            values = [getattr(own.mlp.act_fn, key).item() for own in model.model.layers]
            writer.add_array(f"xielu.{key}", values)


def model_of(family: Family) -> PreTrainedModel:
    return random_model(MODELS[family.tiny] if isinstance(family.tiny, str) else family.tiny)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    family, path = FAMILIES[name], tmp_path / "model.gguf"
    model = model_of(family)
    write(path, family, model)
    check_keys(path)
    (logits,) = packed_logits(load(path, "float32"), [PROMPT])
    assert_same_logits(logits, reference_logits(model, PROMPT))


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2-lite", "glm4", "glm4-moe", "llama4"])
def test_quantized_matrices_equal_transformers(name: str, tmp_path: Path) -> None:
    family, path = FAMILIES[name], tmp_path / "model.gguf"
    tiny = MODELS[family.tiny] if isinstance(family.tiny, str) else family.tiny
    if "deepseek" in name:  # whole blocks in transposed keys
        tiny = Tiny(tiny.model_type, {**tiny.settings, "qk_nope_head_dim": 32})
    model = random_model(tiny)
    write(path, family, model, is_quantized=True)
    (logits,) = packed_logits(load(path, "float32"), [PROMPT])
    assert_same_logits(logits, reference_logits(model, PROMPT))


REFUSALS: dict[str, tuple[str, Values, str]] = {
    "uneven experts": (
        "deepseek-v3",
        {"expert_feed_forward_length": 48},
        "for all tokens has width 128, the others 48",
    ),
    "another length": (
        "mistral-large-3",
        {"attention.temperature_length": 32},
        "temperature_length is 32, and the context before YaRN is 64",
    ),
    "no experts": ("youtu", {"leading_dense_block_count": 1}, "expert_count is 0, but layers"),
    "other latents": ("deepseek-v3", {"attention.kv_lora_rank": 16}, "has no groups of 32 rows"),
    "absurd keys": ("deepseek-v3", {"attention.key_length_mla": 2**26}, "mla is 67108864"),
    "absurd latents": ("deepseek-v3", {"attention.kv_lora_rank": 2**26}, "rank is 67108864"),
    "too few kinds": (
        "olmo3",
        {"attention.sliding_window_pattern": [True]},
        "layer_types has 1 entries for 4 layers",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_run_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, changes, message = REFUSALS[case]
    family, path = FAMILIES[name], tmp_path / "model.gguf"
    write(path, family, model_of(family), **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        load(path)
