"""Small files that ask for much: sizes are compared with the file before anything is made."""

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.formats.hub_copy import save_quantized
from benchmarks.formats.hub_writers import FORMATS, HubFormat, _float8
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from legato.checkpoint.json_file import read_json
from legato.checkpoint.loader import check_shapes, open_checkpoint
from legato.checkpoint.quantization_config import schemes_of
from legato.core.config import LoadFormat, ModelConfig
from legato.core.errors import UnsupportedModelError
from legato.model.quantization import QuantizedWeight
from tests.fuzz.checkpoints import memory_limit
from tests.model.conftest import TINY, SaveTiny, load

from .test_gguf import write_gguf

ROOM_BYTES = 2**29
SIZES = TINY | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
UP = "model.layers.0.mlp.up_proj"
BLOCKS: list[Any] = [
    [0, 128], [-1, 128], ["a", 1], [128], [1, 2, 3], [True, 1], [2**26, 32], [1.0, 128], {}, 5,
]  # fmt: skip
SIZES_OF_GROUPS: list[Any] = [0, -2, True, "x", 2**40, 1.5, []]


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    with memory_limit(ROOM_BYTES):
        yield


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def change_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def fp8(block: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": block}


def awq(group: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": group}


def gptq(group: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": group}


def of_modules(group: Any) -> dict[str, Any]:
    return compressed("pack-quantized") | {"config_groups": {"a": group}}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


def in_blocks(block: Any) -> dict[str, Any]:
    return compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=block
    )


def in_groups(size: Any) -> dict[str, Any]:
    return compressed("pack-quantized", num_bits=4, type="int", group_size=size)


@pytest.mark.parametrize(
    ("key", "config", "values"),
    [
        ("weight_block_size", fp8, BLOCKS),
        ("block_structure", in_blocks, [*BLOCKS, None]),
        ("group_size", awq, SIZES_OF_GROUPS),
        ("group_size", gptq, SIZES_OF_GROUPS),
        ("group_size", in_groups, SIZES_OF_GROUPS),
        ("config_groups", of_modules, ["x", 1, [1], {"weights": "x"}, {"weights": [1]}]),
    ],
)
def test_a_size_that_is_none_is_refused_with_its_file_and_key(
    model: LlamaForCausalLM, tmp_path: Path, key: str, config: Callable[[Any], Any], values: Any
) -> None:
    save_quantized(model, tmp_path, FORMATS["FP8 blocks"])
    for value in values:
        path = change_config(tmp_path, quantization_config=config(value))
        with pytest.raises(UnsupportedModelError, match=rf"{key}.*{path}") as refused:
            open_checkpoint(ModelConfig(model=str(tmp_path)))
        assert "instead of" in str(refused.value), value


@pytest.mark.parametrize("block", [[2**20, 2**20], [2**20, 128], [128, 2**20], [129, 257]])
def test_a_block_larger_than_the_matrix_takes_no_more_than_the_matrix(
    model: LlamaForCausalLM, tmp_path: Path, block: list[int]
) -> None:
    config = FORMATS["FP8 blocks"].config | {"weight_block_size": block}
    within = tuple(min(size, 256) for size in block)
    values = save_quantized(model, tmp_path, HubFormat(config, _float8("weight_scale_inv", within)))
    decoder = load(tmp_path, "float32")
    found = decoder.checkpoint_slots()[f"{UP}.weight"]
    assert torch.allclose(found, values[f"{UP}.weight"], rtol=1e-6)


def test_scales_of_a_block_that_reaches_far_beyond_a_row() -> None:
    """Repeated for each row of the block, they would take 8 GiB."""
    scheme, *_ = schemes_of({"quantization_config": fp8([2**20, 32])})
    assert scheme is not None
    codes = torch.zeros(1, 2**16, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = scheme.read({"weight": codes, "weight_scale_inv": torch.ones(1, 2**11)})
    assert isinstance(weight, QuantizedWeight)
    assert weight.scales.shape == (1, 2**11)


def test_descriptions_beside_4_bit_codes(model: LlamaForCausalLM, tmp_path: Path) -> None:
    save_quantized(model, tmp_path, FORMATS["NF4 nested"])
    name = f"{UP}.weight.quant_state.bitsandbytes__nf4"
    tensors = load_file(tmp_path / "model.safetensors")
    usual = json.loads(bytes(tensors[name].tolist()))
    changes: list[dict[str, Any]] = [
        {"nested_blocksize": 2**30}, {"nested_blocksize": 2**20}, {"nested_blocksize": 0},
        {"nested_blocksize": 1}, {"blocksize": 2**40}, {"blocksize": 16}, {"blocksize": 0},
        {"shape": [-256, -128]}, {"shape": [2**40, 2**40]}, {"shape": [0, 0]}, {"shape": [256]},
        {"shape": [1, 2**15]}, {"nested_offset": "x"},
    ]  # fmt: skip
    states = [json.dumps(usual | change).encode() for change in changes]
    for state in [*states, b"", b"[]", b" " * 2**17 + json.dumps(usual).encode()]:
        packed = torch.frombuffer(bytearray(state or b"\0"), dtype=torch.uint8)
        save_file(tensors | {name: packed}, tmp_path / "model.safetensors")
        with pytest.raises(UnsupportedModelError, match=UP):
            load(tmp_path, "float32")
    save_file(tensors | {name: tensors[name].float()}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=rf"{UP}.*type F32 .* instead of U8"):
        load(tmp_path, "float32")


@pytest.mark.parametrize("part", ["weight.absmax", "weight.nested_absmax"])
@pytest.mark.parametrize("length", [0, 1, 4096])
def test_scales_of_another_length(
    model: LlamaForCausalLM, tmp_path: Path, part: str, length: int
) -> None:
    save_quantized(model, tmp_path, FORMATS["NF4 nested"])
    tensors = load_file(tmp_path / "model.safetensors")
    like = tensors[f"{UP}.{part}"]
    if length != len(like):
        tensors[f"{UP}.{part}"] = torch.ones(length).to(like.dtype)
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(UnsupportedModelError, match=rf"{UP}.*{part} has shape \({length},\)"):
            load(tmp_path, "float32")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_matrix_without_rows_or_columns(
    model: LlamaForCausalLM, tmp_path: Path, name: str, axis: int
) -> None:
    save_quantized(model, tmp_path, FORMATS[name])
    tensors = load_file(tmp_path / "model.safetensors")
    for own, values in tensors.items():
        if own.startswith(UP) and values.ndim > axis:
            tensors[own] = values.narrow(axis, 0, 0).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=UP):
        load(tmp_path, "float32")


@pytest.mark.parametrize("shape", [(2, -1), (0,), ()])
def test_groups_of_columns_in_another_shape(
    model: LlamaForCausalLM, shape: tuple[int, ...], tmp_path: Path
) -> None:
    save_quantized(model, tmp_path, FORMATS["GPTQ"])
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    groups = tensors[f"{UP}.g_idx"]
    is_whole = len(shape) > 1
    tensors[f"{UP}.g_idx"] = groups.view(shape) if is_whole else groups.new_zeros(shape)
    save_file(tensors, path)
    with pytest.raises(UnsupportedModelError, match="g_idx has type I32 and shape"):
        open_checkpoint(ModelConfig(model=str(tmp_path)))


def change_offsets(path: Path, change: Callable[[list[int]], dict[int, int]]) -> None:
    """Change offsets of tensors in a file's header. Args: change: from all offsets to new ones."""
    data = bytearray(path.read_bytes())
    fields = [tensor.field for tensor in GGUFReader(path).tensors]
    places = [field.offset + sum(part.nbytes for part in field.parts[:-1]) for field in fields]
    offsets = [struct.unpack_from("<Q", data, place)[0] for place in places]
    for index, offset in change(offsets).items():
        struct.pack_into("<Q", data, places[index], offset)
    path.write_bytes(data)


def test_tensors_that_overlap(tmp_path: Path, save_tiny: SaveTiny) -> None:
    _, model = save_tiny(LlamaConfig(**TINY))
    path = tmp_path / "model.gguf"
    changes: list[Callable[[list[int]], dict[int, int]]] = [
        lambda offsets: {3: offsets[2]},
        lambda offsets: {len(offsets) - 1: 0},
        lambda offsets: {2: offsets[2] - 32},
        lambda offsets: dict.fromkeys(range(len(offsets)), 0),
    ]
    for change in changes:
        write_gguf(path, "llama", model)
        change_offsets(path, change)
        with pytest.raises(
            UnsupportedModelError, match=rf"{path}: the tensors \S+ and \S+ overlap"
        ):
            open_checkpoint(ModelConfig(model=str(path)))


QWEN_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 64,
    "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "head_dim": 32,
    "num_hidden_layers": 64, "num_attention_heads": 1, "num_key_value_heads": 1,
    "num_experts": 1024, "num_experts_per_tok": 1, "max_position_embeddings": 64,
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 1024,
}  # fmt: skip
QWEN_2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe",
    "shared_expert_intermediate_size": 32,
}  # fmt: skip


@pytest.mark.parametrize("other", [{}, MIXTRAL, QWEN_2_MOE])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_description_of_many_experts(
    tmp_path: Path, other: dict[str, Any], load_format: LoadFormat
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_MOE | other))
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    config = ModelConfig(model=str(tmp_path), load_format=load_format)
    if load_format == "auto":
        with pytest.raises(UnsupportedModelError, match=r"has 1 tensors.* 65,536 experts in 64"):
            check_shapes(open_checkpoint(config))
    change_config(tmp_path, num_hidden_layers=1024)
    with pytest.raises(UnsupportedModelError, match="1,048,576 experts in 1,024 layers"):
        open_checkpoint(config)


def test_a_file_of_json_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    os.truncate(path, 2**40)
    with pytest.raises(UnsupportedModelError, match=rf"{path}: it has 1,099,511,627,776 bytes"):
        read_json(path)


def test_more_tensors_than_any_model_has(
    save_tiny: SaveTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = save_tiny(LlamaConfig(**TINY))
    monkeypatch.setattr("legato.checkpoint.weight_files._MOST_TENSORS", 8)
    with pytest.raises(UnsupportedModelError, match=rf"{folder} has over 8 tensors"):
        open_checkpoint(ModelConfig(model=str(folder)))
