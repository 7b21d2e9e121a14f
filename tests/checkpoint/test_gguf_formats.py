"""GGUF files of every type of matrix: what is read, computed, kept in memory and refused."""

from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from benchmarks.formats.gguf_copy import TypeOf, copy_gguf, everything, medium_mix
from benchmarks.formats.gguf_writers import LARGE, SMALL
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from msgspec.structs import replace
from transformers import LlamaConfig, LlamaForCausalLM

from legato.checkpoint.gguf import _read, _transformers_name
from legato.checkpoint.gguf_file import GGUFFile
from legato.checkpoint.gguf_transforms import undo_interleaving
from legato.checkpoint.loader import load_model, open_checkpoint
from legato.core.config import ModelConfig, Quantization
from legato.core.errors import UnsupportedModelError
from legato.model.native_kernels import native_instructions
from tests.exactness.logits import chunked_logits
from tests.model.conftest import assert_same_logits, load, load_native, reference_logits

from .test_gguf import gguf_writer, write_gguf

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
PROMPT = [(11 * i + 5 * i * i) % 320 for i in range(80)]
LONG = 73
"""A chunk whose rows are not rounded with any instructions."""
MIXES: dict[str, TypeOf] = {
    **{kind: everything(kind) for kind in (*SMALL, *LARGE, "BF16", "F16")},
    "Q4_K_M": medium_mix,
}
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": (0,)}
"""Places of a block's scales; at the start if not named."""
MOST_BITS = {
    **dict.fromkeys(("BF16", "F16"), 16.1),
    "Q8_0": 8.6,
    "Q6_K": 6.6,
    **dict.fromkeys(("Q5_1", "Q2_K"), 6.1),
    **dict.fromkeys(("Q5_0", "Q5_K"), 5.6),
    **dict.fromkeys(("Q4_0", "Q4_K", "IQ4_NL"), 4.6),
}
"""Bits a weight of the layers, scales included; 5.1 for others."""


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    """A random model as float32 GGUF file and in transformers."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1)
    path = tmp_path_factory.mktemp("float32") / "model.gguf"
    write_gguf(path, "llama", model)
    return path, model


@pytest.fixture(params=MIXES)
def mix(request: pytest.FixtureRequest, twin: tuple[Path, LlamaForCausalLM]) -> "Mix":
    source, _ = twin
    path = source.with_name(f"{request.param}.gguf")
    if not path.exists():
        weights = copy_gguf(source, path, MIXES[request.param])
        torch.save(weights, path.with_suffix(".pt"))
    weights = torch.load(path.with_suffix(".pt"), weights_only=False)
    return Mix(request.param, path, weights)


class Mix(NamedTuple):
    """A file, and its weights as the `gguf` package dequantizes them, by their names in it."""

    name: str
    path: Path
    weights: dict[str, np.ndarray]

    def transformers_model(self) -> LlamaForCausalLM:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
        heads = {"attn_q": SHAPE["num_attention_heads"], "attn_k": SHAPE["num_key_value_heads"]}
        state: dict[str, torch.Tensor] = {}
        for name, values in self.weights.items():
            weight = torch.from_numpy(values)
            part = name.split(".")[-2]
            if part in heads:
                weight = undo_interleaving(weight, heads[part])
            state[_transformers_name(name)] = weight
        model.load_state_dict(state)
        return model


def test_logits_are_those_of_the_dequantized_weights(mix: Mix) -> None:
    logits = chunked_logits(load(mix.path, "float32"), PROMPT, 7, len(PROMPT))
    assert_same_logits(logits, reference_logits(mix.transformers_model(), PROMPT))


@pytest.mark.skipif(not native_instructions(), reason="no native kernels run here")
def test_matrices_stay_quantized_in_native_layers(mix: Mix) -> None:
    model = load_native(mix.path, "gguf")
    num_weights = sum(w.size for n, w in mix.weights.items() if "token_embd" not in n)
    bits = 8 * model.num_weight_bytes / num_weights
    assert bits < MOST_BITS.get(mix.name, 5.1), bits
    logits = chunked_logits(model, PROMPT, LONG, len(PROMPT))
    expected = reference_logits(mix.transformers_model(), PROMPT)
    assert float((logits - expected).norm() / expected.norm()) < 0.03


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_damaged_scale_is_refused_by_name(mix: Mix, is_kept: bool) -> None:
    reader = GGUFReader(mix.path)
    (tensor,) = (each for each in reader.tensors if each.name == "blk.1.ffn_down.weight")
    data = bytearray(mix.path.read_bytes())
    kind = tensor.tensor_type
    for place in SCALES.get(kind.name, (0,)):
        start = int(tensor.data_offset) + 3 * GGML_QUANT_SIZES[kind][1] + place
        damage = b"\xff" if kind.name == "MXFP4" else b"\xff\xff"
        data[start : start + len(damage)] = damage
    path = mix.path.with_name("damaged.gguf")
    path.write_bytes(data)
    quantization: Quantization | None = "gguf" if is_kept else None
    checkpoint = open_checkpoint(ModelConfig(model=str(path), quantization=quantization))
    with pytest.raises(UnsupportedModelError, match=r"layers.1.mlp.down_proj.weight has .*nan"):
        load_model(
            checkpoint,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            quantization=quantization,
        )


def test_a_truncated_file_is_refused_by_name(mix: Mix) -> None:
    path = mix.path.with_name("truncated.gguf")
    path.write_bytes(mix.path.read_bytes()[:-3000])
    with pytest.raises(UnsupportedModelError, match=r"cut short: \S+ lies past its end"):
        open_checkpoint(ModelConfig(model=str(path)))


FLOATS = {"F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64"}
OF_ACTIVATIONS = {"Q8_1", "Q8_K"}
"""Types that llama.cpp has in memory alone."""
RARE = {
    "IQ1_S": (0,),
    "IQ1_M": (),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "NVFP4": (),
    "Q1_0": (0,),
}
"""Key types without a writer, value places of a block's float16 scales."""


def random_blocks(kind: GGMLQuantizationType, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Return random codes with a scale that keeps the weights small."""
    size, num_bytes = GGML_QUANT_SIZES[kind]
    source = np.random.default_rng(seed)
    blocks = source.integers(0, 256, (shape[0] * shape[1] // size, num_bytes), np.uint8)
    scale = np.frombuffer(np.float16(2.0**-7).tobytes(), np.uint8)
    for place in RARE[kind.name]:
        blocks[:, place : place + 2] = scale
    if kind.name == "IQ1_M":  # its digits are the upper ones of four numbers
        blocks[:, 49::2] &= 0x0F
        blocks[:, 55] |= 0x20
    if kind.name == "NVFP4":
        blocks[:, :4] = blocks[:, :4] % 16 + 16
    return blocks.reshape(shape[0], -1)


def dequantized(kind: GGMLQuantizationType, blocks: np.ndarray) -> np.ndarray:
    if kind.name != "Q1_0":
        values: np.ndarray = dequantize(blocks, kind)
        return values
    own = blocks.reshape(-1, 18)
    signs = np.unpackbits(own[:, 2:], axis=1, bitorder="little") * 2.0 - 1
    scales = own[:, :2].copy().view(np.float16).astype(np.float32)
    return (signs * scales).astype(np.float32).reshape(len(blocks), -1)


def test_every_type_of_the_format_is_read(
    twin: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    """One file, whose matrices take turns."""
    assert {*SMALL, *LARGE, *RARE, *FLOATS, *OF_ACTIVATIONS} == set(
        GGMLQuantizationType.__members__
    )
    kinds = cycle(GGMLQuantizationType[name] for name in RARE)
    path, weights = tmp_path / "model.gguf", {}
    writer = gguf_writer(path, "llama", LlamaConfig(**SHAPE))
    for i, tensor in enumerate(GGUFReader(twin[0]).tensors):
        rows = np.array(tensor.data)
        weights[tensor.name] = rows
        if rows.ndim == 1:
            writer.add_tensor(tensor.name, rows)
            continue
        kind = next(kinds)
        blocks = random_blocks(kind, rows.shape, i)
        writer.add_tensor(tensor.name, blocks, raw_dtype=kind)
        weights[tensor.name] = dequantized(kind, blocks)
        if kind.name == "NVFP4":
            stem = tensor.name.removesuffix("weight")
            writer.add_tensor(f"{stem}scale", np.array([0.75], np.float32))
            writer.add_tensor(f"{stem}input_scale", np.array([3.0], np.float32))
            weights[tensor.name] *= 0.75
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    logits = chunked_logits(load(path, "float32"), PROMPT, 7, len(PROMPT))
    expected = reference_logits(Mix("rare", path, weights).transformers_model(), PROMPT)
    assert expected.isfinite().all()
    assert_same_logits(logits, expected)


@pytest.mark.parametrize("num_scales", [0, 1, 2, 3, 4])
def test_scales_of_whole_matrices(num_scales: int, tmp_path: Path) -> None:
    """Of two experts with three rows each; 0 for one without dimensions."""
    kind, path = GGMLQuantizationType.NVFP4, tmp_path / "model.gguf"
    blocks = random_blocks(kind, (6, 64), 0)
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("a.weight", blocks.reshape(2, 3, -1), raw_dtype=kind)
    scales = np.arange(max(1, num_scales)) + 2
    halves = (scales.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    writer.add_tensor("a.scale", halves, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    if not num_scales:
        file.tensors["a.scale"] = replace(file.tensors["a.scale"], shape=())
    if num_scales > 2:
        with pytest.raises(UnsupportedModelError, match=f"has {num_scales} numbers for 2 matr"):
            _read(file, "a.weight")
        return
    expected = dequantize(blocks, kind).reshape(2, 3, -1) * scales.reshape(-1, 1, 1)
    assert np.array_equal(_read(file, "a.weight"), expected.astype(np.float32))
