"""Checkpoints with a quantization_config: what is read, computed, kept in memory and refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from benchmarks.formats.hub_copy import save_quantized
from benchmarks.formats.hub_writers import FORMATS, HubFormat, _float8
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from legato.checkpoint.loader import load_model, open_checkpoint
from legato.core.config import ModelConfig
from legato.core.errors import UnsupportedModelError
from legato.model.native_kernels import native_instructions
from legato.model.quantization import QuantizedWeight
from tests.exactness.logits import chunked_logits
from tests.model.conftest import assert_same_logits, load, load_native, reference_logits

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
"""Blocks of 128 are cut at the edges."""
PROMPT = [(11 * i + 5 * i * i) % 320 for i in range(80)]
LONG = 73
"""A chunk whose rows are not rounded with any instructions."""
DOWN = "model.layers.1.mlp.down_proj"
MOST_BITS = {"GPTQ 8 bits": 8.7, "W8A8": 8.2, "NVFP4": 5.1, "NVFP4 ModelOpt": 5.1} | {
    name: 8.4 for name in FORMATS if name.startswith("FP8")
}
"""Bits of a weight in memory, scales included; 4.6 for others."""


class Saved(NamedTuple):
    """A checkpoint, and what its weights stand for."""

    name: str
    folder: Path
    values: dict[str, torch.Tensor]

    def transformers_model(self) -> LlamaForCausalLM:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
        model.load_state_dict(self.values)
        return model

    def changed(self, change: Callable[[dict[str, torch.Tensor]], None], folder: Path) -> Path:
        """Copy the checkpoint into `folder`, with other tensors."""
        tensors = load_file(self.folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_bytes((self.folder / "config.json").read_bytes())
        return folder


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1)
    return model


@pytest.fixture(scope="module", params=FORMATS)
def saved(
    request: pytest.FixtureRequest,
    model: LlamaForCausalLM,
    tmp_path_factory: pytest.TempPathFactory,
) -> Saved:
    folder = tmp_path_factory.mktemp("quantized")
    return Saved(request.param, folder, save_quantized(model, folder, FORMATS[request.param]))


def test_weights_are_what_the_format_says(saved: Saved) -> None:
    checkpoint = open_checkpoint(ModelConfig(model=str(saved.folder)))
    num_quantized = 0
    for name, weight in checkpoint.tensors(torch.device("cpu")):
        if isinstance(weight, QuantizedWeight):
            num_quantized += 1
            error = (weight.dequantize() - saved.values[name]).abs().max()
            assert float(error) <= 1e-6 * float(saved.values[name].abs().max()), name
    assert num_quantized == 14


def test_logits_are_those_of_the_dequantized_weights(saved: Saved) -> None:
    logits = chunked_logits(load(saved.folder, "float32"), PROMPT, 7, len(PROMPT))
    assert_same_logits(logits, reference_logits(saved.transformers_model(), PROMPT))


@pytest.mark.skipif(not native_instructions(), reason="no native kernels run here")
def test_matrices_stay_quantized_in_native_layers(saved: Saved) -> None:
    assert open_checkpoint(ModelConfig(model=str(saved.folder))).dtype == torch.bfloat16
    model = load_native(saved.folder)
    head_bytes = 2 * saved.values["lm_head.weight"].numel()
    matrices = [values.numel() for name, values in saved.values.items() if "proj" in name]
    bits = 8 * (model.num_weight_bytes - head_bytes) / sum(matrices)
    assert bits < MOST_BITS.get(saved.name, 4.6), bits
    widened = load_native(saved.folder, "none").num_weight_bytes - head_bytes
    assert 16 <= 8 * widened / sum(matrices) < 16.1
    logits = chunked_logits(model, PROMPT, LONG, len(PROMPT))
    expected = reference_logits(saved.transformers_model(), PROMPT)
    assert float((logits - expected).norm() / expected.norm()) < 0.04


def test_a_truncated_tensor_is_refused_by_name(saved: Saved, tmp_path: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        for name in (f"{DOWN}.qweight", f"{DOWN}.weight_packed", f"{DOWN}.weight"):
            if name in tensors:
                tensors[name] = tensors[name][:-1].contiguous()

    saved.changed(cut, tmp_path)
    with pytest.raises(UnsupportedModelError, match=rf"{DOWN}\S* (has type|has shape|cannot)"):
        open_and_load(tmp_path)


def test_a_missing_part_is_refused_by_name(saved: Saved, tmp_path: Path) -> None:
    def lose(tensors: dict[str, torch.Tensor]) -> None:
        for suffix in ("scales", "weight_scale", "weight_scale_inv", "weight.absmax"):
            tensors.pop(f"{DOWN}.{suffix}", None)

    saved.changed(lose, tmp_path)
    with pytest.raises(UnsupportedModelError, match=DOWN):
        open_and_load(tmp_path)


def test_a_damaged_scale_is_refused_by_name(saved: Saved, tmp_path: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        for suffix in ("scales", "weight_scale", "weight_scale_inv", "weight.nested_absmax"):
            scales = tensors.get(f"{DOWN}.{suffix}")
            if scales is None:
                continue
            if scales.dtype in (torch.uint8, torch.float8_e4m3fn):
                scales.view(torch.uint8).view(-1)[3] = 0xFF
            else:
                scales.view(-1)[0] = torch.nan
        absmax = tensors.get(f"{DOWN}.weight.absmax")
        if absmax is not None and absmax.dtype == torch.float32:
            absmax[3] = torch.inf

    saved.changed(damage, tmp_path)
    with pytest.raises(UnsupportedModelError, match=rf"{DOWN}.weight has a scale of (nan|inf)"):
        open_and_load(tmp_path)


def open_and_load(folder: Path) -> None:
    checkpoint = open_checkpoint(ModelConfig(model=str(folder)))
    load_model(checkpoint, dtype=torch.bfloat16, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "aqlm"}, "quantized.*'aqlm'.*Legato reads awq, gptq"),
        ({"quant_method": "awq", "bits": 3}, "awq: bits is 3; Legato reads 4"),
        ({"quant_method": "awq", "bits": 4, "version": "exllama"}, "version is 'exllama'"),
        ({"quant_method": "gptq", "bits": 3}, "gptq: bits is 3; Legato reads 4 and 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "x"}, "group_size is 'x'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "instead of two numbers from 1"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_4bit"),
        ({"quant_method": "compressed-tensors", "format": "x"}, "no config_groups"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "marlin-24",
                "config_groups": {"a": {"weights": {"num_bits": 4}}},
            },
            "format 'marlin-24' is not supported",
        ),
    ],
)
def test_other_formats_are_refused_before_weights_are_read(
    model: LlamaForCausalLM, tmp_path: Path, config: dict[str, object], message: str
) -> None:
    contents = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(contents | {"quantization_config": config}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(ModelConfig(model=str(tmp_path)))


def test_groups_that_kernels_lack_are_widened(
    model: LlamaForCausalLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks of 8 inputs: no kernel multiplies them."""
    config = FORMATS["FP8 blocks"].config | {"weight_block_size": [8, 8]}
    form = HubFormat(config, _float8("weight_scale_inv", (8, 8)))
    values = save_quantized(model, tmp_path, form)
    weight = load(tmp_path, "float32").checkpoint_slots()[f"{DOWN}.weight"]
    assert torch.allclose(weight, values[f"{DOWN}.weight"], rtol=1e-6)
    if native_instructions():
        with caplog.at_level("WARNING"):
            load_native(tmp_path)
        assert "matrices in groups of 8 are widened" in caplog.text


def test_groups_of_unequal_size_are_widened(model: LlamaForCausalLM, tmp_path: Path) -> None:
    form = FORMATS["GPTQ"]
    save_quantized(model, tmp_path, form)
    tensors = load_file(tmp_path / "model.safetensors")
    before = load(tmp_path, "float32").checkpoint_slots()[f"{DOWN}.weight"].clone()
    tensors[f"{DOWN}.g_idx"][0] = 1
    save_file(tensors, tmp_path / "model.safetensors")
    after = load(tmp_path, "float32").checkpoint_slots()[f"{DOWN}.weight"]
    assert torch.allclose(after[:, 1:], before[:, 1:])
    assert not torch.allclose(after[:, 0], before[:, 0])
    tensors[f"{DOWN}.g_idx"][0] = 99
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=f"{DOWN} cannot be read: its columns name"):
        load(tmp_path, "float32")
