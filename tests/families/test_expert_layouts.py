"""Experts as they are on the Hub, fused or one by one, and what is wrong with them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from legato.checkpoint.loader import load_model, open_checkpoint
from legato.core.config import ModelConfig
from legato.core.errors import UnsupportedModelError
from legato.model.native_kernels import NativeKernels
from legato.model.native_model import NativeModel
from legato.model.native_support import why_not_native
from tests.executor.instructions import TESTED
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
    logits_of,
    renamed,
    without,
)
from tests.families.test_native import _logits as native_logits
from tests.families.tiny import MODELS, random_model
from tests.model.conftest import assert_same_logits, reference_logits

FLOATS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def hub_name(old: str, new: str) -> Callable[[Config], Config]:
    return lambda config: without(config, old) | {new: config[old]}


GATED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
UNGATED = {"up_proj": ("up_proj",), "down_proj": ("down_proj",)}


def fused(tensors: Tensors, kinds: Mapping[str, Sequence[str]] = GATED) -> Tensors:
    """All experts of a layer in two tensors, as transformers has them in memory.

    Args:
        kinds: key a tensor of all experts, value the matrices of each expert in it.
    """
    own = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in {name.partition(".experts.")[0] for name in set(tensors) - set(own)}:
        for fused_name, parts in kinds.items():
            own[f"{layer}.experts.{fused_name}"] = torch.stack(
                [
                    torch.cat([tensors[f"{layer}.experts.{i}.{part}.weight"] for part in parts])
                    for i in range(6)
                ]
            )
    return own


def with_extra(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: torch.ones(2, 2) for name in names}


def minimax(config: Config) -> Config:
    return without(config, "rope_parameters") | {
        "rope_theta": 1e4,
        "rotary_dim": 32,
        "shared_intermediate_size": 0,
        "scoring_func": "sigmoid",
    }


def hunyuan(config: Config) -> Config:
    return config | {
        "moe_topk": [3, 3, 3],
        "moe_intermediate_size": [96, 96, 96],
        "num_shared_expert": [1, 1, 1],
    }


LAYOUTS = {
    "Qwen3-30B-A3B": Layout("qwen3-moe", hub_name("num_local_experts", "num_experts")),
    "Qwen3, fused": Layout("qwen3-moe", tensors=fused),
    "Mixtral, fused": Layout(
        "mixtral",
        tensors=lambda tensors: fused(
            renamed(r"w1\.", "gate_proj.")(
                renamed(r"w2\.", "down_proj.")(renamed(r"w3\.", "up_proj.")(tensors))
            )
        ),
    ),
    "GLM-4.5": Layout(
        "glm4-moe",
        lambda config: (
            without(config, "rope_parameters")
            | {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1}
        ),
        with_extra("model.layers.3.embed_tokens.weight", "model.layers.3.eh_proj.weight"),
    ),
    "MiniMax-M2": Layout("minimax-m2", minimax),
    "Ernie 4.5": Layout("ernie4.5-moe", tensors=with_extra("model.mtp_block.0.norm.weight")),
    "Hunyuan-A13B": Layout("hunyuan-moe", hunyuan),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    check_logits(LAYOUTS[name], tmp_path)


def with_4_bit_floats(model: PreTrainedModel, folder: Path) -> None:
    """Save gpt-oss with its experts in MXFP4, and give the model the same weights."""
    generator = torch.Generator().manual_seed(0)
    packed: Tensors = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                count, depth, num_outputs = parameter.shape
                shape = count, num_outputs, depth // 32
                codes = torch.randint(0, 16, (*shape, 32), generator=generator)
                scales = torch.randint(121, 125, shape, generator=generator)
                signs = torch.where(codes >= 8, -1.0, 1.0)
                values = FLOATS[codes % 8] * signs * 2.0 ** (scales - 127)[..., None]
                parameter.copy_(values.flatten(2).mT)
                pairs = codes.unflatten(-1, (16, 2))
                packed[f"{name}_blocks"] = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)
                packed[f"{name}_scales"] = scales.to(torch.uint8)
    model.save_pretrained(folder)

    def tensors(plain: Tensors) -> Tensors:
        kept = {name: tensor for name, tensor in plain.items() if f"{name}_blocks" not in packed}
        return kept | packed

    config = {"quantization_config": {"quant_method": "mxfp4"}}
    change(folder, Layout("gpt-oss", lambda config_: config_ | config, tensors))


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    reference = random_model(MODELS["gpt-oss"])
    with_4_bit_floats(reference, tmp_path)
    exact = reference_logits(reference, PROMPT)
    assert_same_logits(logits_of(tmp_path), exact)
    if why_not_native(open_checkpoint(ModelConfig(model=str(tmp_path))).spec, torch.bfloat16, CPU):
        return
    for instructions in TESTED:
        model = load_model(
            open_checkpoint(ModelConfig(model=str(tmp_path))),
            dtype=torch.bfloat16,
            device=CPU,
            kernels=NativeKernels(2, instructions),
        )
        assert isinstance(model, NativeModel)
        assert model.num_weight_bytes < sum(p.numel() for p in reference.parameters()) * 1.5
        error = (native_logits(tmp_path, PROMPT, NativeKernels(2, instructions)) - exact).abs()
        assert float(error.mean(1).median()) <= 0.01 * float(exact.abs().max()), instructions


@pytest.mark.parametrize(
    ("model", "pattern"),
    [
        ("qwen3-moe", "layers.2.mlp.experts.4.up_proj.weight"),
        ("granite-moe", "layers.1.block_sparse_moe.input_linear.weight"),
        ("gpt-oss", "layers.1.mlp.experts.gate_up_proj"),
        ("gpt-oss", "layers.1.mlp.experts.down_proj_bias"),
    ],
)
def test_a_truncated_tensor_is_refused_by_name(model: str, pattern: str, tmp_path: Path) -> None:
    random_model(MODELS[model]).save_pretrained(tmp_path)

    def truncated(tensors: Tensors) -> Tensors:
        return {
            name: tensor[1:].contiguous() if name.endswith(pattern) else tensor
            for name, tensor in tensors.items()
        }

    change(tmp_path, Layout(model, tensors=truncated))
    expected = pattern.replace("block_sparse_moe.input_linear", "mlp.experts.gate_up_proj")
    with pytest.raises(UnsupportedModelError, match=rf"{expected}.* has shape"):
        logits_of(tmp_path)


@pytest.mark.parametrize("part", ["blocks", "scales"])
def test_truncated_4_bit_floats_are_refused_by_name(part: str, tmp_path: Path) -> None:
    with_4_bit_floats(random_model(MODELS["gpt-oss"]), tmp_path)
    name = f"model.layers.1.mlp.experts.down_proj_{part}"

    def truncated(tensors: Tensors) -> Tensors:
        return tensors | {name: tensors[name][:, 1:].contiguous()}

    change(tmp_path, Layout("gpt-oss", tensors=truncated))
    with pytest.raises(UnsupportedModelError, match=r"layers.1.mlp.experts.down_proj.*_scales"):
        open_checkpoint(ModelConfig(model=str(tmp_path)))


REFUSALS: dict[str, tuple[str, Config, str]] = {
    "too many picked": ("mixtral", {"num_experts_per_tok": 7}, "7 experts .* cannot be picked"),
    "uneven groups": ("glm4-moe", {"n_group": 4}, "6 experts cannot be divided into 4 groups"),
    "no step": ("qwen3-moe", {"decoder_sparse_step": 0}, "cannot read"),
    "clipped": ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
    "different": ("hunyuan-moe", {"moe_topk": [1, 2, 3]}, "moe_topk differs between layers"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_run_is_refused_by_name(name: str, tmp_path: Path) -> None:
    check_refused(Refusal(*REFUSALS[name]), tmp_path)
