"""Weights that are no numbers are refused by name, wherever they are."""

import math
import struct
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from legato.checkpoint.loader import load_model, open_checkpoint
from legato.core.config import ModelConfig, Quantization
from legato.core.errors import UnsupportedModelError
from tests.model.conftest import TINY, SaveTiny

from .test_gguf import write_gguf

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(save_tiny: SaveTiny) -> Path:
    return save_tiny(LlamaConfig(**TINY))[0]


def plant(folder: Path, name: str, place: tuple[int | slice, ...], value: float) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name][place] = value
    save_file(tensors, path)


def load_as(path: Path, dtype: torch.dtype, quantization: Quantization | None = None) -> None:
    checkpoint = open_checkpoint(ModelConfig(model=str(path), quantization=quantization))
    load_model(checkpoint, dtype=dtype, device=torch.device("cpu"), quantization=quantization)


EVERYTHING = (slice(None), slice(None))


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        (UP, EVERYTHING, math.nan, rf"{UP} has nan at \[0, 0\]: the checkpoint is damaged"),
        (UP, (12, 40), math.nan, rf"{UP} has nan at \[12, 40\]"),
        ("lm_head.weight", (250, slice(None)), math.inf, r"lm_head.weight has inf at \[250, 0\]"),
        ("model.embed_tokens.weight", (319, 63), -math.inf, r"has -inf at \[319, 63\]"),
        ("model.norm.weight", (3,), math.nan, r"model.norm.weight has nan at \[3\]"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_value_is_found(
    folder: Path,
    name: str,
    place: tuple[int | slice, ...],
    value: float,
    message: str,
    dtype: torch.dtype,
) -> None:
    plant(folder, name, place, value)
    with pytest.raises(UnsupportedModelError, match=message):
        load_as(folder, dtype)


def test_what_is_too_large_for_the_dtype_only(folder: Path) -> None:
    plant(folder, UP, (12, 40), -1e5)
    load_as(folder, torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match=r"-100000 at \[12, 40\]: too large"):
        load_as(folder, torch.float16)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_what_is_quantized(folder: Path, quantization: Quantization, value: float) -> None:
    plant(folder, UP, (12, 40), value)
    with pytest.raises(UnsupportedModelError, match=rf"{UP} has a scale .* \[12, 32\] on"):
        load_as(folder, torch.bfloat16, quantization)


def test_gguf_as_it_is_quantized(save_tiny: SaveTiny, tmp_path: Path) -> None:
    _, model = save_tiny(LlamaConfig(**TINY))
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", model, quantization=GGMLQuantizationType.Q8_0)
    load_as(path, torch.bfloat16, "gguf")
    (tensor,) = (t for t in GGUFReader(path).tensors if t.name == "blk.1.ffn_up.weight")
    data = bytearray(path.read_bytes())
    struct.pack_into("<e", data, int(tensor.data_offset), math.nan)
    path.write_bytes(data)
    with pytest.raises(UnsupportedModelError, match=rf"{UP} has a scale of nan .* \[0, 0\]"):
        load_as(path, torch.bfloat16, "gguf")
    with pytest.raises(UnsupportedModelError, match=rf"{UP} has a scale of nan .* \[0, 0\]"):
        load_as(path, torch.bfloat16)
