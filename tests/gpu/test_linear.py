"""Products with weights in codes and in 8-bit floats."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from legato.gpu import linear
from legato.gpu.decoder import GpuDecoder
from legato.model.mlp_spec import Activation
from legato.model.quantization import BLOCK, FLOAT8_TABLE, QuantizedWeight, quantize
from legato.model.quantized_forms import in_blocks, with_whole_table
from tests.gpu.numbers import assert_near, each_dtype
from tests.model.random_models import SPECS, random_decoder


@each_dtype
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "depth"), [(1, 40, 96), (17, 33, 32), (130, 70, 160)]
)
def test_multiplies_with_codes(
    device: torch.device,
    dtype: torch.dtype,
    bits: int,
    num_rows: int,
    num_outputs: int,
    depth: int,
) -> None:
    from legato.gpu.kernels.quantized import multiply
    from legato.gpu.linear import packed

    generator = torch.Generator().manual_seed(num_rows)
    weight = quantize(torch.randn(num_outputs, depth, generator=generator), bits)
    rows = (torch.randn(num_rows, depth, generator=generator) / depth**0.5).to(dtype)
    bias = torch.randn(num_outputs, generator=generator).to(dtype)
    out = torch.empty(num_rows, num_outputs, dtype=dtype, device=device)
    blocks = in_blocks(weight)
    assert blocks is not None
    assert blocks.minima is not None
    parts = (packed(weight), blocks.scales, blocks.minima, bias)
    multiply(rows.to(device), *(part.to(device) for part in parts), out)
    assert_near(out, rows.double() @ weight.dequantize().double().T + bias.double(), dtype)


def float8_weight(num_outputs: int, depth: int, group: int) -> QuantizedWeight:
    """Of all finite floats, subnormal ones too."""
    generator = torch.Generator().manual_seed(num_outputs)
    codes = torch.randint(0x7F, (num_outputs, depth), generator=generator, dtype=torch.uint8)
    codes |= torch.randint(2, codes.shape, generator=generator, dtype=torch.uint8) << 7
    scales = torch.rand(num_outputs, depth // group, generator=generator) / 448
    return QuantizedWeight(codes, scales, None, 8, table=FLOAT8_TABLE)


@each_dtype
@pytest.mark.parametrize("num_rows", [1, 17, 130, 513])
def test_multiplies_with_8_bit_floats_as_they_are(
    device: torch.device, dtype: torch.dtype, num_rows: int
) -> None:
    """Exactly as with what they stand for, in the rows' dtype."""
    from legato.gpu.linear import QuantizedLinear

    weight = float8_weight(40, 192, 64)
    rows = torch.randn(num_rows, 192, generator=torch.Generator().manual_seed(0)).to(dtype) / 14
    out = QuantizedLinear(weight, None, device)(rows.to(device))
    assert_near(out, rows.double() @ weight.dequantize().double().T, dtype)


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float16, linear.MOST_ROWS), (torch.float32, 0)], ids=str
)
def test_step_times_are_told_for_how_many_rows_codes_are_multiplied(
    dtype: torch.dtype, most: int, device: torch.device
) -> None:
    plain = random_decoder(SPECS["grouped"], dtype)
    weights = plain.checkpoint_slots()
    codes = {
        name: quantize(weight.float(), 4) if "down_proj" in name else weight
        for name, weight in weights.items()
    }
    for loaded, expected in ((weights, 0), (codes, most)):
        model = GpuDecoder(plain.spec, dtype=dtype, device=device)
        model.load_weights(loaded.items())
        assert model.most_packed == expected


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("num_rows", "dtype"),
    [(513, torch.float16), (3, torch.float16), (3, torch.float32)],
    ids=["many rows", "few rows", "float32"],
)
def test_multiplies_with_codes_or_what_they_stand_for(
    device: torch.device, num_rows: int, dtype: torch.dtype, bits: int
) -> None:
    from legato.gpu.linear import QuantizedLinear

    generator = torch.Generator().manual_seed(bits)
    weight = quantize(torch.randn(40, 160, generator=generator), bits)
    rows = (torch.randn(num_rows, 160, generator=generator) / 160**0.5).to(dtype)
    bias = torch.randn(40, generator=generator).to(dtype)
    out = QuantizedLinear(weight, bias.to(device), device)(rows.to(device))
    assert_near(out, rows.double() @ weight.dequantize().double().T + bias.double(), dtype)


def test_codes_are_packed_in_half_the_bytes() -> None:
    from legato.gpu.linear import packed

    weight = quantize(torch.randn(6, 64), 4)
    assert packed(weight).shape == (6, 32)


def test_rounds_rows_to_the_nearest_8_bit_float(device: torch.device) -> None:
    """Those of PyTorch's conversion, at the row's own scale, tiny and odd rows included."""
    from legato.gpu.linear import rounded

    rows = torch.randn(6, 100, generator=torch.Generator().manual_seed(0))
    rows *= torch.tensor([1.0, 1e-6, 1e4, 1.0, 0.0, 1.0])[:, None]
    rows[3, 1:] *= 1e-4  # beside one great number, the others are subnormal or nothing
    rows[5] = (torch.arange(100) - 50) / 50 * 448  # among them, exact halves between two floats
    values, scales = rounded(rows.to(device))
    largest = rows.abs().amax(dim=1, keepdim=True)
    torch.testing.assert_close(scales.cpu(), (largest / 448).clamp(min=1e-30))
    expected = (rows / scales.cpu()).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert values.cpu().float().equal(expected.float())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_has_no_scale(device: torch.device, value: float) -> None:
    from legato.gpu.linear import rounded

    rows = torch.randn(6, 100, generator=torch.Generator().manual_seed(0))
    _, before = rounded(rows.to(device))
    rows[2, 55] = value
    _, scales = rounded(rows.to(device))
    assert scales[2].isnan()
    scales[2] = before[2]
    assert scales.equal(before)


@pytest.mark.parametrize(("size", "activation"), [(48, "gelu_tanh"), (1100, "silu")])
def test_gates_and_rounds_as_one_after_the_other(
    device: torch.device, size: int, activation: Activation
) -> None:
    from legato.gpu.kernels.activation import apply_gates
    from legato.gpu.linear import rounded

    generator = torch.Generator().manual_seed(size)
    gate_up = torch.randn(3, 2 * size, generator=generator).to(device, torch.bfloat16) * 3
    gated = gate_up.new_empty(3, size)
    apply_gates(gate_up, gated, activation)
    for found, expected in zip(rounded(gate_up, activation), rounded(gated), strict=True):
        assert found.float().equal(expected.float())


@pytest.mark.parametrize("has_bias", [True, False])
def test_multiplies_8_bit_floats(device: torch.device, has_bias: bool) -> None:
    """Within what rounding both sides to 3 bits behind the first brings: less than 5 in 100."""
    from legato.gpu.linear import Fp8Linear, rounded

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 256, generator=generator)
    weight *= torch.logspace(-3, 3, 48)[:, None]  # each output has a scale of its own
    rows = torch.randn(5, 256, generator=generator).bfloat16()
    usual = weight.norm(dim=1)  # of a product with numbers of about one
    bias = (torch.randn(48, generator=generator) * usual).to(device).bfloat16()
    linear = Fp8Linear(*rounded(weight.to(device)), bias if has_bias else None)
    out = linear(rows.to(device)).cpu()
    expected = rows.double() @ weight.double().T + (bias.cpu().double() if has_bias else 0.0)
    errors = (out.double() - expected) / usual
    assert errors.square().mean().sqrt() < 0.05
    assert errors.abs().max() < 0.25


def test_short_sums_of_8_bit_floats_are_added_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def note(rows: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        asked.append(options["use_fast_accum"])
        return rows.new_empty(len(rows), weight.shape[1], dtype=options["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", note)
    for depth in (linear.MOST_FAST_DEPTH, linear.MOST_FAST_DEPTH + 16):
        values = torch.zeros(1, depth).to(torch.float8_e4m3fn)
        scales = torch.ones(1, 1)
        linear.Fp8Linear(values, scales, None)._product(values, scales, torch.bfloat16)
    assert asked == [True, False]


def test_adding_fast_errs_less_than_rounding_to_8_bits() -> None:
    """A model of the adder: of 32 products and their sum so far, aligned, 13 bits are kept."""
    generator = torch.Generator().manual_seed(0)
    rows, weights = torch.randn(2, 4, linear.MOST_FAST_DEPTH, generator=generator)
    rows[:, ::500] *= 50  # as activations have
    sides = [(side, side.abs().amax(1, keepdim=True) / 448) for side in (rows, weights)]
    (left, left_scale), (right, right_scale) = (
        ((side / scale).to(torch.float8_e4m3fn).double(), scale.double()) for side, scale in sides
    )
    products = left[:, None] * right
    fast = torch.zeros(4, 4, dtype=torch.float64)
    for some in products.split(32, dim=2):
        terms = torch.cat([some, fast[:, :, None]], dim=2)
        kept = 2.0 ** (terms.abs().amax(2, keepdim=True).log2().floor() - 13)
        fast = ((terms / kept).trunc() * kept).sum(2)
    scales = left_scale * right_scale.T
    rounding = products.sum(2) * scales - rows.double() @ weights.double().T
    adding = (fast - products.sum(2)) * scales
    assert 0 < adding.norm() < 0.1 * rounding.norm()


def test_larger_groups_stay_codes_and_others_do_not() -> None:
    weight = replace(quantize(torch.randn(6, 128), 8), scales=torch.rand(6, 2))
    blocks = in_blocks(weight)
    assert blocks is not None
    assert blocks.group == BLOCK
    assert torch.allclose(blocks.dequantize(), weight.dequantize(), rtol=0, atol=0.1)
    assert in_blocks(replace(weight, scales=torch.rand(6, 8))) is None
    assert in_blocks(replace(weight, order=torch.randperm(128).int())) is None
    assert in_blocks(replace(weight, scales=torch.full((6, 2), 1e6))) is None


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_TABLES = {
    "4-bit floats": torch.cat([_E2M1, -_E2M1]),
    "whole numbers": torch.arange(-127, 113, 16).float(),
}


@pytest.mark.parametrize("name", _TABLES)
def test_indices_into_whole_or_half_numbers_become_codes(name: str) -> None:
    """Without an error, whether or not the table is in bytes already; others stay indices."""
    table = _TABLES[name]
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(len(table), (6, 128), generator=generator).to(torch.uint8)
    scales = 2.0 ** torch.randint(-12, 3, (6, 4), generator=generator)
    weight = QuantizedWeight(codes, scales, None, 4, table=table)
    for form in (weight, with_whole_table(weight)):
        blocks = in_blocks(form)
        assert blocks is not None
        assert blocks.bits == 8
        assert blocks.table is None
        assert blocks.dequantize().equal(weight.dequantize())
    assert in_blocks(replace(weight, table=table / 3)) is None


@each_dtype
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_bias", [True, False])
def test_few_tiles_are_summed_in_parts(
    device: torch.device, dtype: torch.dtype, bits: int, has_bias: bool, monkeypatch: Any
) -> None:
    """Also where the last part is shorter than the others."""
    from legato.gpu.kernels import quantized
    from legato.gpu.linear import packed

    short = quantized._Tiling(32, 7, 1, 4, 1)  # three programs for each of two tiles
    monkeypatch.setattr(quantized, "_WEIGHTS_FIRST", {16: short})
    monkeypatch.setattr(quantized, "_ROWS_FIRST", {16: short})
    num_parts = 0
    sum_parts = quantized._sum_parts

    class Counted:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **kwargs: Any) -> None:
                nonlocal num_parts
                num_parts = kwargs["num_parts"]
                sum_parts[grid](*args, **kwargs)

            return launch

    monkeypatch.setattr(quantized, "_sum_parts", Counted())
    generator = torch.Generator().manual_seed(bits)
    weight = quantize(torch.randn(40, 416, generator=generator), bits)
    rows = (torch.randn(3, 416, generator=generator) / 416**0.5).to(dtype)
    bias = torch.randn(40, generator=generator).to(dtype) if has_bias else None
    out = torch.empty(3, 40, dtype=dtype, device=device)
    blocks = in_blocks(weight)
    assert blocks is not None
    assert blocks.minima is not None
    parts = (packed(weight), blocks.scales, blocks.minima)
    quantized.multiply(
        rows.to(device),
        *(part.to(device) for part in parts),
        None if bias is None else bias.to(device),
        out,
    )
    expected = rows.double() @ weight.dequantize().double().T
    assert_near(out, expected if bias is None else expected + bias.double(), dtype)
    assert num_parts == 2


@pytest.mark.parametrize(
    ("num_tiles", "depth", "num_parts"),
    [(128, 14_336, 4), (896, 4096, 1), (192, 4096, 2), (1, 96, 1), (4, 14_336, 14), (1000, 512, 1)],
)
def test_a_long_row_of_codes_is_cut_where_there_are_few_tiles(
    num_tiles: int, depth: int, num_parts: int
) -> None:
    """Into parts that cover it once, and that begin with a tile."""
    from legato.gpu.kernels.quantized import _DEPTH, _ROWS_FIRST

    count, part_depth = _ROWS_FIRST[16].parts(num_tiles, depth)
    assert count == num_parts
    assert part_depth % _DEPTH == 0
    assert (count - 1) * part_depth < depth <= count * part_depth
