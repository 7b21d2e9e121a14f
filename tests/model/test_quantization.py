"""Blocks of 32 weights: those of GGUF files stay what they are, others are rounded."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from gguf.quants import quantize as quantize_gguf
from hypothesis import given
from hypothesis import strategies as st

from legato.checkpoint.gguf import _read_quantized
from legato.checkpoint.gguf_blocks import split_blocks
from legato.checkpoint.gguf_file import GGUFFile
from legato.checkpoint.loader import load_model, open_checkpoint
from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL, ModelConfig, Quantization
from legato.core.errors import ConfigError
from legato.model.decoder import Decoder
from legato.model.quantization import BLOCK, QuantizedWeight, concatenate, quantize

KINDS = {kind: GGMLQuantizationType[kind] for kind in ("Q8_0", "Q4_0", "Q4_1")}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("place", range(4))
def test_blocks_of_a_file_mean_the_same(kind: GGMLQuantizationType, place: int) -> None:
    """Wherever in memory a file's alignment, which may be 1, lets them lie."""
    values = np.random.default_rng(0).normal(size=(64, 8 * BLOCK)).astype(np.float32)
    raw = quantize_gguf(values, kind)
    in_file = np.frombuffer(bytes(place) + raw.tobytes(), np.uint8, offset=place)
    blocks = split_blocks(in_file.reshape(-1, GGML_QUANT_SIZES[kind][1]), kind)
    assert blocks is not None
    parts = (torch.from_numpy(part).reshape(64, -1) for part in blocks[:3])
    weight = QuantizedWeight(*parts, blocks.bits)
    assert int(weight.codes.max()) < 2**blocks.bits
    assert (weight.dequantize().numpy() == dequantize(raw, kind)).all()


def test_other_blocks_are_not_split() -> None:
    raw = np.zeros((4, GGML_QUANT_SIZES[GGMLQuantizationType.Q4_K][1]), np.uint8)
    assert split_blocks(raw, GGMLQuantizationType.Q4_K) is None


@given(
    bits=st.sampled_from((4, 8)),
    scale=st.sampled_from((0.0, 1e-3, 0.02, 1.0, 50.0)),
    offset=st.sampled_from((0.0, 0.5, -3.0)),
    seed=st.integers(0, 10**6),
)
def test_rounding_errs_by_half_a_code(bits: int, scale: float, offset: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 4 * BLOCK, generator=generator) * scale + offset
    blocks = weight.unflatten(1, (-1, BLOCK))
    low, high = blocks.aminmax(dim=-1)
    reach = 2 * blocks.abs().amax(dim=-1) / 254 if bits == 8 else (high - low) / 15
    # Scale and minimum are themselves rounded, to 11 bits.
    allowed = reach / 2 + blocks.abs().amax(dim=-1) * 2.0**-9 + 2.0**-22
    error = (quantize(weight, bits).dequantize() - weight).unflatten(1, (-1, BLOCK)).abs()
    assert (error.amax(dim=-1) <= allowed).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_quantized_stays_so(bits: int) -> None:
    once = quantize(torch.randn(16, 8 * BLOCK), bits).dequantize()
    assert torch.allclose(quantize(once, bits).dequantize(), once, atol=2e-3)


def test_parts_of_a_matrix() -> None:
    four, eight = quantize(torch.randn(2, BLOCK), 4), quantize(torch.randn(3, BLOCK), 8)
    both = concatenate([four, eight])
    assert both.bits == 8
    assert (both.dequantize() == torch.cat([four.dequantize(), eight.dequantize()])).all()
    swapped = both.map(lambda part: part.flip(0))
    assert (swapped.dequantize() == both.dequantize().flip(0)).all()


def test_the_default_models_blocks_stand_for_what_ggml_reads() -> None:
    file = GGUFFile(resolve_source(DEFAULT_MODEL, None).path)
    num_quantized = 0
    for name in file.tensors:
        weight = _read_quantized(file, name)
        if weight is not None:
            num_quantized += 1
            assert (weight.dequantize().numpy() == file.read(name)).all(), name
    assert num_quantized > 30


def test_other_kernels_take_what_the_blocks_stand_for() -> None:
    plain, quantized = (load_in_float32(quantization) for quantization in (None, "gguf"))
    expected = plain.checkpoint_slots()
    for name, weight in quantized.checkpoint_slots().items():
        assert torch.equal(weight, expected[name]), name
    assert quantized.num_weight_bytes == plain.num_weight_bytes


def load_in_float32(quantization: Quantization | None) -> Decoder:
    model = load_model(
        open_checkpoint(ModelConfig(quantization=quantization)),
        dtype=torch.float32,
        device=torch.device("cpu"),
        quantization=quantization,
    )
    assert isinstance(model, Decoder)
    return model


def test_only_a_gguf_file_has_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="needs a GGUF file"):
        open_checkpoint(ModelConfig(model=str(folder), quantization="gguf"))


def test_a_cpu_has_no_8_bit_floats() -> None:
    config = ModelConfig(quantization="fp8")
    with pytest.raises(ConfigError, match="fp8 is for GPUs; a CPU takes int8 and int4"):
        load_model(
            open_checkpoint(config),
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            quantization=config.quantization,
        )
