"""Checkpoints as they are on the Hub, where that is not what transformers saves."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from legato.checkpoint.loader import load_model, open_checkpoint
from legato.core.config import ModelConfig
from legato.core.errors import UnsupportedModelError
from tests.families.layouts import (
    CPU,
    PROMPT,
    Config,
    Layout,
    Refusal,
    Tensors,
    change,
    check_logits,
    check_refused,
    renamed,
    without,
)
from tests.families.tiny import MODELS, random_model
from tests.model.conftest import assert_same_logits, reference_logits
from tests.model.dense import packed_logits


def flat_gemma3(config: Config) -> Config:
    """gemma-3-1b-it: theta by kind of layer in two fields, and the pattern as a number."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    return without(config, "rope_parameters", "layer_types") | {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": scaling,
        "sliding_window_pattern": 6,
    }


def nested(kind: str) -> Callable[[Config], Config]:
    """Put the text model's description into one of a model with images."""

    def change(config: Config) -> Config:
        text = without(config, "architectures", "tie_word_embeddings", "dtype")
        return {
            "architectures": [kind],
            "model_type": kind.lower(),
            "dtype": config["dtype"],
            "text_config": text,
            "tie_word_embeddings": config["tie_word_embeddings"],
            "vision_config": {"hidden_size": 8},
        }

    return change


def with_images(prefix: str) -> Callable[[Tensors], Tensors]:
    """Add tensors of a vision model, and name those of the text model as a part."""

    def change(tensors: Tensors) -> Tensors:
        text = {re.sub(r"^model\.", prefix, name): tensor for name, tensor in tensors.items()}
        outer = "model." if prefix.startswith("model.") else ""
        return text | {
            f"{outer}vision_tower.layers.0.mlp.fc1.weight": torch.ones(2, 2),
            f"{outer}multi_modal_projector.norm.weight": torch.ones(3),
        }

    return change


def old_phi4(config: Config) -> Config:
    rope = without(config["rope_parameters"], "rope_theta", "partial_rotary_factor", "rope_type")
    return without(config, "rope_parameters") | {
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope"} | without(rope, "original_max_position_embeddings"),
        "original_max_position_embeddings": 64,
    }


def pythia(config: Config) -> Config:
    return without(config, "rope_parameters") | {"rotary_pct": 0.25, "rotary_emb_base": 10000}


def with_buffers(tensors: Tensors) -> Tensors:
    layer = "gpt_neox.layers.0.attention."
    found = renamed(r"^lm_head", "embed_out")(tensors)
    return found | {
        f"{layer}bias": torch.ones(1, 1, 4, 4),
        f"{layer}masked_bias": torch.tensor(-1e9),
        f"{layer}rotary_emb.inv_freq": torch.ones(4),
    }


def old_olmo3(config: Config) -> Config:
    yarn = without(config["rope_parameters"]["full_attention"], "rope_theta")
    return without(config, "rope_parameters", "layer_types") | {
        "rope_theta": 10000.0,
        "rope_scaling": yarn,
    }


def hub_lfm2(config: Config) -> Config:
    """LFM2-1.2B: the MLP's width, the attention layers and the tied embedding by other names."""
    rope = {"rope_theta": config["rope_parameters"]["rope_theta"]}
    names = "intermediate_size", "layer_types", "rope_parameters", "tie_word_embeddings"
    return (
        without(config, *names)
        | rope
        | {
            "block_ff_dim": config["intermediate_size"],
            "full_attn_idxs": [1],
            "tie_embedding": True,
        }
    )


def with_more_models(tensors: Tensors) -> Tensors:
    """Qwen3.5: tensors of a vision model, and of a predictor of further tokens."""
    text = renamed(r"^model\.", "model.language_model.")(tensors)
    return text | {
        "model.visual.blocks.0.norm1.weight": torch.ones(3),
        "mtp.layers.0.input_layernorm.weight": torch.ones(3),
        "mtp.norm.weight": torch.ones(3),
    }


def hub_gemma4(config: Config) -> Config:
    """Gemma 4: heads by kind of layer in fields of their own."""
    own = without(config, "per_layer_config") | {"global_head_dim": 64}
    is_unified = config["model_type"] == "gemma4_unified_text"
    kind = f"Gemma4{'Unified' if is_unified else ''}ForConditionalGeneration"
    return nested(kind)(own)


def with_sounds(tensors: Tensors) -> Tensors:
    """Gemma 4 E2B: tensors of images and sounds, and keys and values that no layer reads."""
    text = renamed(r"^model\.", "model.language_model.")(tensors)
    attention = "model.language_model.layers.4.self_attn"
    return text | {
        "model.vision_tower.std_bias": torch.ones(3),
        "model.embed_vision.embedding_projection.weight": torch.ones(2, 2),
        "model.audio_tower.layers.0.norm.weight": torch.ones(3),
        "model.embed_audio.embedding_projection.weight": torch.ones(2, 2),
        f"{attention}.k_proj.weight": torch.ones(32, 128),
        f"{attention}.v_proj.weight": torch.ones(32, 128),
        f"{attention}.k_norm.weight": torch.ones(32),
    }


def kimi(config: Config) -> Config:
    """Kimi-K2.5: the text model's own type, and a tie key that another class would have."""
    whole = nested("KimiK25ForConditionalGeneration")(config)
    text = {**whole["text_config"], "model_type": "kimi_k2", "tie_word_embeddings": False}
    return without(whole, "tie_word_embeddings") | {"text_config": text}


def flat_qwen2_vl(config: Config) -> Config:
    """Qwen2.5-VL-7B: all keys of the text model at the top."""
    rope = {"type": "mrope", "mrope_section": [4, 6, 6]}
    return without(config, "rope_parameters", "architectures") | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "rope_scaling": rope,
        "vision_config": {"hidden_size": 8},
    }


def mixed_qwen2_vl(config: Config) -> Config:
    """Saved again: a part that lacks keys which are at the top."""
    flat = flat_qwen2_vl(config)
    moved = ("hidden_size", "num_hidden_layers", "rope_scaling")
    text = {"model_type": "qwen2_5_vl_text", **{name: flat[name] for name in moved}}
    return without(flat, *moved) | {"text_config": text}


def chat_internvl(config: Config) -> Config:
    """InternVL3.5 of OpenGVLab: the text model's description is `llm_config`."""
    whole = nested("InternVLChatModel")(config)
    return without(whole, "text_config") | {"llm_config": whole["text_config"]}


def transposed_experts(tensors: Tensors) -> Tensors:
    """Qwen3-VL-30B-A3B: experts in one tensor, inputs by outputs, gates before ups."""
    found = renamed(r"^model\.", "model.language_model.")(
        {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    )
    layers = {name.rsplit(".", 3)[0] for name in tensors if ".experts." in name}
    for layer in layers:
        own = {
            part: torch.stack([tensors[f"{layer}.{i}.{part}_proj.weight"].T for i in range(6)])
            for part in ("gate", "up", "down")
        }
        name = layer.replace("model.", "model.language_model.", 1)
        found[f"{name}.gate_up_proj"] = torch.cat([own["gate"], own["up"]], dim=-1)
        found[f"{name}.down_proj"] = own["down"].contiguous()
    return found


def part_of_llava(*towers: str) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        text = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        return text | {f"{tower}.layers.0.weight": torch.ones(2, 2) for tower in towers}

    return change


LAYOUTS = {
    "kimi-k2.5": Layout("deepseek-v3", kimi, part_of_llava("vision_tower", "mm_projector")),
    "qwen2.5-vl": Layout(
        "qwen2",
        flat_qwen2_vl,
        lambda tensors: tensors | {"visual.blocks.0.norm1.weight": torch.ones(3)},
    ),
    "qwen2.5-vl as saved": Layout(
        "qwen2", mixed_qwen2_vl, renamed(r"^model\.", "model.language_model.")
    ),
    "internvl3.5": Layout("qwen3", chat_internvl, part_of_llava("vision_model", "mlp1")),
    "qwen3-vl-moe": Layout(
        "qwen3-moe",
        lambda config: nested("Qwen3VLMoeForConditionalGeneration")(
            config | {"model_type": "qwen3_vl_moe_text"}
        ),
        transposed_experts,
    ),
    "nemotron-nano-vl": Layout(
        "nemotron-h",
        lambda config: chat_internvl(config) | {"architectures": ["NemotronH_Nano_VL_V2"]},
        part_of_llava("vision_model", "mlp1"),
    ),
    "gemma-4-e2b": Layout("gemma4-e2b", hub_gemma4, with_sounds),
    "gemma-4-12b": Layout(
        "gemma4-12b",
        lambda config: hub_gemma4(config | {"num_global_key_value_heads": 1}),
        lambda tensors: (
            renamed(r"^model\.", "model.language_model.")(tensors)
            | {"model.vision_embedder.patch_ln1.weight": torch.ones(3)}
        ),
    ),
    "qwen3.5": Layout("qwen3.5", nested("Qwen3_5ForConditionalGeneration"), with_more_models),
    "gemma-3-1b": Layout("gemma3", flat_gemma3),
    "gemma-3-4b": Layout(
        "gemma3", nested("Gemma3ForConditionalGeneration"), with_images("language_model.model.")
    ),
    "gemma-3-4b as saved": Layout(
        "gemma3", nested("Gemma3ForConditionalGeneration"), with_images("model.language_model.")
    ),
    "ministral-3": Layout(
        "ministral3",
        nested("Mistral3ForConditionalGeneration"),
        lambda tensors: renamed(r"^lm_head", "language_model.lm_head")(
            with_images("language_model.model.")(tensors)
        ),
    ),
    "phi-4-mini": Layout("phi4-mini", old_phi4),
    "pythia": Layout("gpt-neox", pythia, with_buffers),
    "olmo-3": Layout("olmo3", old_olmo3),
    "glm-4": Layout(
        "glm4",
        lambda config: (
            without(config, "rope_parameters")
            | {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        ),
    ),
    "granite-4": Layout("granite-4", lambda config: config | {"layer_types": ["attention"] * 4}),
    "lfm2": Layout("lfm2", hub_lfm2),
    "granite-4-h": Layout(
        "granite-4-h",
        lambda config: config | {"layer_types": ["mamba", "attention", "mamba"]},
    ),
    "smollm3": Layout(
        "smollm3",
        lambda config: (
            without(config, "layer_types", "rope_parameters")
            | {"no_rope_layers": [1, 1, 1, 0], "rope_theta": 2e6}
        ),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    check_logits(LAYOUTS[name], tmp_path)


@pytest.mark.parametrize(
    ("name", "unused"),
    [
        ("qwen3.5", ("mtp", "visual")),
        ("gemma-4-e2b", ("audio_tower", "embed_audio", "embed_vision", "vision_tower")),
    ],
)
def test_parts_that_do_not_run_are_named(
    name: str, unused: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    random_model(MODELS[LAYOUTS[name].model]).save_pretrained(tmp_path)
    change(tmp_path, LAYOUTS[name])
    checkpoint = open_checkpoint(ModelConfig(model=str(tmp_path)))
    assert checkpoint.unused == unused
    with caplog.at_level("INFO"):
        load_model(checkpoint, dtype=torch.float32, device=CPU)
    assert f"not used are {', '.join(unused)}" in caplog.text


def test_short_contexts_have_the_short_factors(tmp_path: Path) -> None:
    """Served up to the length in training, a longrope model is what transformers makes of it."""
    reference = random_model(MODELS["phi4-mini"])
    reference.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(ModelConfig(model=str(tmp_path), max_model_len=64))
    model = load_model(checkpoint, dtype=torch.float32, device=CPU)
    (logits,) = packed_logits(model, [PROMPT[:60]])
    assert_same_logits(logits, reference_logits(reference, PROMPT[:60]))


REFUSALS: dict[str, tuple[str, Config, str]] = {
    "mamba alone": (
        "granite-4",
        {"layer_types": ["mamba"] * 4, "mamba_n_heads": 8, "mamba_d_head": 32},
        "models without attention",
    ),
    "layer types": ("lfm2", {"layer_types": ["rwkv"] * 4}, "unsupported layer types rwkv"),
    "value heads": (
        "qwen3.5",
        {"linear_num_key_heads": 3},
        "4 value heads cannot share 3 key heads",
    ),
    "both ways in gemma4": (
        "gemma4-31b",
        {"use_bidirectional_attention": "all"},
        "attention to later tokens",
    ),
    "other differences of layers": (
        "gemma4-31b",
        {"per_layer_config": {"1": {"head_dim": 64, "intermediate_size": 32}}},
        "layers that differ in intermediate_size",
    ),
    "heads of a kind": (
        "gemma4-31b",
        {"per_layer_config": {"1": {"head_dim": 64}}},
        "layers with full_attention and heads of different sizes",
    ),
    "all layers read others": ("gemma4-e2b", {"num_kv_shared_layers": 6}, "6 of 6 layers cannot"),
    "no layer to read": (
        "gemma4-e2b",
        {"num_kv_shared_layers": 4},
        "no layer with full_attention has keys and values that others can read",
    ),
    "embeddings of few tokens": (
        "gemma4-e2b",
        {"vocab_size_per_layer_input": 300},
        "of 300 tokens, fewer than 320",
    ),
    "both ways": ("gemma3", {"use_bidirectional_attention": True}, "attention to later tokens"),
    "part of a head": ("smollm3", {"partial_rotary_factor": 0.5}, "only a part of each head"),
    "activation": ("arcee", {"hidden_act": "tanh"}, "unsupported activation 'tanh'"),
    "layers": ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 4 layers"),
    "layers with chunks": ("llama4", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 4"),
    "kinds with chunks": ("llama4", {"layer_types": ["linear_attention"] * 4}, "unsupported layer"),
    "temperature": ("llama4", {"floor_scale": 0}, "floor_scale is 0.0, not 1 or more"),
    "no chunk": ("llama4", {"attention_chunk_size": 0}, "window"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_run_is_refused_by_name(name: str, tmp_path: Path) -> None:
    check_refused(Refusal(*REFUSALS[name]), tmp_path)


def test_fused_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    reference = random_model(MODELS["phi3"])
    reference.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    save_file({**tensors, name: tensors[name][1:].contiguous()}, weights)
    with pytest.raises(UnsupportedModelError, match="has no groups of 256 rows"):
        open_checkpoint(ModelConfig(model=str(tmp_path)))
