"""Quantizing and widening take memory for the result and a few rows, not several matrices."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmarks.formats.hub_writers import FORMATS
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize as to_gguf

from legato.checkpoint.finite import check_finite
from legato.checkpoint.gguf_file import GGUFFile
from legato.checkpoint.integer_schemes import in_groups
from legato.checkpoint.quantization_config import schemes_of
from legato.core.errors import UnsupportedModelError
from legato.model.quantization import QuantizedWeight, quantize, quantize_rotated
from tests.fuzz.checkpoints import memory_limit

SHAPE = 16_384, 1024
MATRIX_BYTES = 2 * SHAPE[0] * SHAPE[1]
"""In bfloat16."""
FEW_ROWS_BYTES = 2**24
QUANTIZERS = {
    "int8": lambda weight: quantize(weight, 8),
    "int4": lambda weight: quantize(weight, 4),
    "w8a8": quantize_rotated,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Each thread would map memory of its own."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def weights() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_of_rounding(name: str) -> None:
    weight = weights().bfloat16()
    QUANTIZERS[name](weight[:512])  # libraries map memory of their own first
    with memory_limit(MATRIX_BYTES + FEW_ROWS_BYTES):
        quantized = QUANTIZERS[name](weight)
        quantized_rows = QUANTIZERS[name](weight[-3:])
    assert torch.equal(quantized.codes[-3:], quantized_rows.codes)
    assert torch.equal(quantized.scales[-3:], quantized_rows.scales)


@pytest.mark.parametrize("name", FORMATS)
def test_of_reading_and_widening(name: str) -> None:
    form = FORMATS[name]
    parts, values = form.write(weights())
    parts = {suffix: part.contiguous() for suffix, part in parts.items()}
    scheme, *_ = schemes_of({"quantization_config": form.config})
    assert scheme is not None
    with memory_limit(2 * MATRIX_BYTES + FEW_ROWS_BYTES):
        weight = scheme.read(parts)
    assert isinstance(weight, QuantizedWeight)
    with memory_limit(2 * MATRIX_BYTES + 2 * FEW_ROWS_BYTES):
        widened = weight.dequantize()
    assert float((widened - values).abs().max()) <= 1e-6 * float(values.abs().max())


def test_of_widening_groups_of_unequal_size() -> None:
    weight = quantize(weights(), 4)
    group_of = torch.arange(SHAPE[1], dtype=torch.int32) // weight.group
    group_of[0] = 1
    with memory_limit(2 * MATRIX_BYTES + 2 * FEW_ROWS_BYTES):
        widened = in_groups(weight, group_of)
    assert isinstance(widened, torch.Tensor)
    assert torch.equal(widened[:, 1:], weight.dequantize()[:, 1:])


def test_of_looking_for_damage() -> None:
    weight = quantize(weights(), 8)
    stored = QuantizedWeight(
        weight.codes, weight.scales, None, 8, is_stored_only=True, zero=weight.zero
    )
    with memory_limit(MATRIX_BYTES + FEW_ROWS_BYTES):
        check_finite("weight", stored, torch.float16)
    stored.scales[300, 2] = torch.inf
    with pytest.raises(UnsupportedModelError, match=r"weight has -?(inf|nan) at \[300, 6[4-9]\]"):
        check_finite("weight", stored, torch.float16)


def test_of_a_gguf_type_that_is_widened(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    values = weights().numpy()
    kind = GGMLQuantizationType.BF16
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", to_gguf(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    with memory_limit(2 * MATRIX_BYTES + FEW_ROWS_BYTES):
        read = file.read("token_embd.weight")
    assert (read == torch.from_numpy(values).bfloat16().float().numpy()).all()
