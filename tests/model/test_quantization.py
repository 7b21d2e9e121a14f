"""Blocks of 32 weights: those of GGUF files stay what they are, others are rounded."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks.formats.gguf_writers import LARGE, SMALL
from benchmarks.formats.gguf_writers import quantize as quantize_gguf
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
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
from legato.model.native_kernels import native_instructions
from legato.model.quantization import BLOCK, QuantizedWeight, plain, quantize
from legato.model.quantized_forms import (
    can_concatenate,
    concatenate,
    halved,
    native_form,
    with_whole_table,
)
from legato.model.transforms import _transposed
from tests.model.conftest import load_native

KINDS = (*SMALL, *LARGE)


def read(raw: np.ndarray, kind: str) -> QuantizedWeight:
    """Split the blocks [N, bytes] of a matrix."""
    block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    blocks = split_blocks(raw.reshape(-1, block_bytes), GGMLQuantizationType[kind])
    assert blocks is not None
    codes, scales, minima, table = (
        None if part is None else torch.from_numpy(part) for part in (*blocks[:3], blocks.table)
    )
    assert codes is not None
    assert scales is not None
    return QuantizedWeight(
        codes.reshape(len(raw), -1),
        scales.reshape(len(raw), -1),
        None if minima is None else minima.reshape(len(raw), -1),
        blocks.bits,
        zero=blocks.zero,
        table=table,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", range(4))
def test_blocks_of_a_file_mean_the_same(kind: str, place: int) -> None:
    """Wherever in memory a file's alignment, which may be 1, lets them lie."""
    values = np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32)
    raw = quantize_gguf(values, kind)
    in_file = np.frombuffer(bytes(place) + raw.tobytes(), np.uint8, offset=place)
    weight = read(in_file.reshape(64, -1), kind)
    assert int(weight.codes.max()) < 2**weight.bits
    expected = dequantize(raw, GGMLQuantizationType[kind])
    assert (weight.dequantize().numpy() == expected).all()
    errors = np.linalg.norm(expected - values, axis=1) / np.linalg.norm(values, axis=1)
    assert errors.max() < {"Q2_K": 0.4, "Q3_K": 0.25}.get(kind, 0.15)


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_of_a_block_means_the_same(kind: str) -> None:
    """Random bytes, but scales that are numbers."""
    generator = np.random.default_rng(0)
    raw = quantize_gguf(generator.normal(size=(64, 512)).astype(np.float32), kind)
    block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    blocks = raw.reshape(-1, block_bytes)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(kind, (0, 2))
    kept = [byte for half in halves for byte in (half, half + 1)]
    others = [byte for byte in range(block_bytes) if byte not in kept]
    blocks[:, others] = generator.integers(0, 256, (len(blocks), len(others)))
    expected = dequantize(raw, GGMLQuantizationType[kind])
    assert (read(raw, kind).dequantize().numpy() == expected).all()


@pytest.mark.parametrize("kind", KINDS)
def test_scales_lose_at_most_half_a_digit_in_kernels(kind: str) -> None:
    values = np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32) / 1e6
    weight = read(quantize_gguf(values, kind), kind)
    packed = native_form([weight])
    assert packed is not None
    assert packed.scales.dtype == torch.float16
    allowed = weight.dequantize().abs().amax(dim=1, keepdim=True) * 2.0**-10
    assert ((packed.dequantize() - weight.dequantize()).abs() <= allowed).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", ["Q4_K", "Q6_K", "IQ4_XS", "Q8_0"])
def test_parts_of_different_kinds(kind: str, other: str) -> None:
    values = np.random.default_rng(0).normal(size=(8, 512)).astype(np.float32)
    parts = [read(quantize_gguf(values, each), each) for each in (kind, other)]
    assert can_concatenate(parts)
    expected = torch.cat([part.dequantize() for part in parts])
    assert torch.allclose(concatenate(parts).dequantize(), expected, rtol=1e-6, atol=1e-6)


def test_parts_that_differ_in_the_order_of_inputs() -> None:
    weight = quantize(torch.randn(2, 64), 4)
    order = torch.randperm(64).int()
    moved = replace(weight, order=order)
    assert not can_concatenate([weight, moved])
    assert can_concatenate([moved, moved])
    assert torch.equal(moved.dequantize()[:, order.long()], weight.dequantize())


@given(exponent=st.integers(-90, 90))
def test_scales_of_any_size(exponent: int) -> None:
    scales = torch.full((2, 3), 2.0**exponent)
    weight = QuantizedWeight(torch.full((2, 96), 5, dtype=torch.uint8), scales, None, 4)
    assert torch.equal(halved(weight).dequantize(), weight.dequantize())


def test_other_blocks_are_not_split() -> None:
    raw = np.zeros((4, GGML_QUANT_SIZES[GGMLQuantizationType.IQ2_XS][1]), np.uint8)
    assert split_blocks(raw, GGMLQuantizationType.IQ2_XS) is None


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
    plain, quantized = (load_in_float32(quantization) for quantization in ("none", None))
    expected = plain.checkpoint_slots()
    for name, weight in quantized.checkpoint_slots().items():
        assert torch.equal(weight, expected[name]), name
    assert quantized.num_weight_bytes == plain.num_weight_bytes


@pytest.mark.skipif(not native_instructions(), reason="no native kernels run here")
def test_a_gguf_file_stays_packed_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading widens the embedding alone; steps look up single rows of it."""
    num_widened = 0
    dequantized = QuantizedWeight._dequantized

    def counted(weight: QuantizedWeight) -> torch.Tensor:
        nonlocal num_widened
        num_widened += weight.codes.numel()
        return dequantized(weight)

    monkeypatch.setattr(QuantizedWeight, "_dequantized", counted)
    path = resolve_source(DEFAULT_MODEL).path
    packed = load_native(path)
    spec = open_checkpoint(ModelConfig()).decoder_spec
    assert num_widened == spec.vocab_size * spec.hidden_size
    assert packed.num_weight_bytes < 0.4 * load_native(path, "none").num_weight_bytes
    assert packed.num_weight_bytes == load_native(path, "gguf").num_weight_bytes


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
    with pytest.raises(ConfigError, match="fp8 is for GPUs; a CPU takes int8, int4, w8a8 and w4a8"):
        load_model(
            open_checkpoint(config),
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            quantization=config.quantization,
        )


@given(st.lists(st.floats(-1, 1, width=32), min_size=15, max_size=15))
def test_a_table_is_rounded_to_bytes_in_a_unit_that_suits_it(numbers: list[float]) -> None:
    """No number is off by more than 1/200 of the largest; one unit of 1/127 is no better."""
    table = torch.tensor([1.0, *numbers])
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)[None]
    weight = with_whole_table(QuantizedWeight(codes, torch.ones(1, 1), None, 4, table=table))
    errors = weight.dequantize()[0, :16] - table
    usual = (table * 127).round() / 127 - table
    assert errors.abs().max() <= 1 / 200 + 1e-6
    assert errors.square().sum() <= usual.square().sum() + 1e-6


def test_columns_in_another_order_are_transposed_as_plain_ones() -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).int()
    codes = torch.arange(64 * 64).reshape(64, 64).to(torch.uint8)
    weight = QuantizedWeight(codes, torch.ones(64, 2).half(), None, 8, zero=128, order=order)
    assert torch.equal(plain(_transposed(weight)), plain(weight).T)
