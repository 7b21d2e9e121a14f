"""Families with recurrent layers as they are on the Hub, and what is wrong with them."""

import json
from pathlib import Path

import pytest
import torch

from legato.checkpoint.loader import load_model, open_checkpoint
from legato.core.config import ModelConfig
from legato.core.errors import UnsupportedModelError
from tests.families.layouts import (
    CPU,
    Config,
    Layout,
    Refusal,
    Tensors,
    change,
    check_logits,
    check_refused,
    logits_of,
    renamed,
    without,
)
from tests.families.test_expert_layouts import UNGATED, fused, with_extra
from tests.families.test_hub_layouts import nested, with_more_models
from tests.families.tiny import MODELS, random_model


def with_more_parts(tensors: Tensors) -> Tensors:
    """Qwen3.5-35B-A3B: fused experts, among the tensors of other models."""
    experts = {"mtp.layers.0.mlp.experts.gate_up_proj": torch.ones(6, 2, 2)}
    return with_more_models(fused(tensors)) | experts


def flat_rope(config: Config) -> Config:
    return without(config, "rope_parameters") | {
        "rope_theta": config["rope_parameters"]["rope_theta"]
    }


def old_granite(config: Config) -> Config:
    kinds = ["attention" if "full" in kind else "mamba" for kind in config["layer_types"]]
    return config | {"layer_types": kinds}


def patterned(config: Config) -> Config:
    """Nemotron-3-Nano: the kinds of layers as letters."""
    letters = {"linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-"}
    kinds = config["layers_block_type"]
    return without(config, "layers_block_type") | {
        "hybrid_override_pattern": "".join(letters[kind] for kind in kinds),
        "num_hidden_layers": len(kinds),
        "num_nextn_predict_layers": 1,
    }


def backbone(tensors: Tensors) -> Tensors:
    own = renamed(r"^model\.", "backbone.")(tensors)
    return own | {"mtp.layers.0.mixer.q_proj.weight": torch.ones(2, 2)}


LAYOUTS = {
    "Qwen3.5-35B-A3B": Layout(
        "qwen3.5-moe", nested("Qwen3_5MoeForConditionalGeneration"), with_more_parts
    ),
    "Qwen3-Next-80B-A3B": Layout(
        "qwen3-next",
        lambda config: (
            without(config, "layer_types", "rope_parameters")
            | {"full_attention_interval": 4, "partial_rotary_factor": 0.25, "rope_theta": 1e4}
        ),
        with_extra("mtp.layers.0.mlp.experts.0.up_proj.weight", "mtp.fc.weight"),
    ),
    "Qwen3-Next, fused": Layout("qwen3-next", tensors=fused),
    "Granite-4.0-H-Tiny": Layout("granite-4-h-moe", old_granite),
    "LFM2-8B-A1B": Layout("lfm2-moe", flat_rope),
    "LFM2, fused": Layout(
        "lfm2-moe",
        tensors=lambda tensors: fused(
            renamed(r"(experts.*)w1\.", r"\1gate_proj.")(
                renamed(r"(experts.*)w2\.", r"\1down_proj.")(
                    renamed(r"(experts.*)w3\.", r"\1up_proj.")(tensors)
                )
            )
        ),
    ),
    "Falcon-H1": Layout("falcon-h1", flat_rope),
    "Nemotron-Nano-9B-v2": Layout("nemotron-h", patterned, backbone),
    "Nemotron-3-Nano": Layout("nemotron-3", patterned, backbone),
    "Nemotron 3, fused": Layout("nemotron-3", tensors=lambda tensors: fused(tensors, UNGATED)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    check_logits(LAYOUTS[name], tmp_path)


def test_other_parts_of_a_mixture_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    random_model(MODELS["qwen3.5-moe"]).save_pretrained(tmp_path)
    change(tmp_path, LAYOUTS["Qwen3.5-35B-A3B"])
    with caplog.at_level("INFO"):
        load_model(
            open_checkpoint(ModelConfig(model=str(tmp_path))), dtype=torch.float32, device=CPU
        )
    assert "not used are mtp, visual" in caplog.text


def test_a_pattern_goes_before_the_number_of_layers(tmp_path: Path) -> None:
    random_model(MODELS["nemotron-h"]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 3}))
    spec = open_checkpoint(ModelConfig(model=str(tmp_path))).decoder_spec
    assert [layer.has_mixer for layer in spec.layers] == [True, False, True, False, True]
    assert [layer.mlp is None for layer in spec.layers] == [True, False, True, False, True]


@pytest.mark.parametrize(
    ("model", "pattern"),
    [
        ("nemotron-3", "layers.1.mixer.experts.4.up_proj.weight"),
        ("lfm2-moe", "layers.1.feed_forward.experts.2.w3.weight"),
        ("qwen3.5-moe", "layers.0.mlp.shared_expert_gate.weight"),
        ("falcon-h1", "layers.1.mamba.in_proj.weight"),
    ],
)
def test_a_truncated_tensor_is_refused(model: str, pattern: str, tmp_path: Path) -> None:
    random_model(MODELS[model]).save_pretrained(tmp_path)
    found: list[str] = []

    def truncated(tensors: Tensors) -> Tensors:
        found.extend(name for name in tensors if name.endswith(pattern))
        return tensors | {name: tensors[name][:, 1:].contiguous() for name in found}

    change(tmp_path, Layout(model, tensors=truncated))
    assert found
    with pytest.raises(UnsupportedModelError, match=r"layers.*weight has shape"):
        logits_of(tmp_path)


REFUSALS: dict[str, tuple[str, Config, str]] = {
    "factor and biases of attention": (
        "falcon-h1",
        {"attention_bias": True},
        "attention_bias with attention_in_multiplier",
    ),
    "factor and biases of mamba": (
        "falcon-h1",
        {"mamba_proj_bias": True, "projectors_bias": True},
        "mamba_proj_bias with ssm_in_multiplier",
    ),
    "one bias": ("falcon-h1", {"projectors_bias": True}, "must be the same"),
    "no factor": ("falcon-h1", {"key_multiplier": 0.0}, "scale is 0.0"),
    "inputs of mamba": ("falcon-h1", {"mamba_d_head": 24}, "6 heads of 24 are not inputs of 192"),
    "mamba alone": (
        "nemotron-h",
        {"layers_block_type": ["linear_attention", "mlp"]},
        "models without attention",
    ),
    "kinds of layers": (
        "nemotron-h",
        {"layers_block_type": ["rwkv", "full_attention"]},
        "unsupported layer types rwkv",
    ),
    "too many layers": (
        "nemotron-h",
        {"layers_block_type": ["full_attention"] * 1025},
        "1025 layers are not supported",
    ),
    "biases of shared experts": ("nemotron-3", {"mlp_bias": True}, "mlp_bias with experts"),
    "activation": ("nemotron-3", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu'"),
    "uneven groups": ("nemotron-3", {"n_group": 4}, "6 experts cannot be divided into 4 groups"),
    "no shared MLP": ("granite-4-h-moe", {"shared_intermediate_size": 0}, "shared_size is 0"),
    "too many picked": ("lfm2-moe", {"num_experts_per_tok": 7}, "7 experts .* cannot be picked"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_run_is_refused_by_name(name: str, tmp_path: Path) -> None:
    check_refused(Refusal(*REFUSALS[name]), tmp_path)
