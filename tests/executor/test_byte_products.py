"""Products with activations in 8 bits, and weights in 8 or 4, on every set of instructions."""

from functools import cache

import pytest
import torch

from legato.checkpoint.loader import fill_model, load_model, open_checkpoint
from legato.core.config import ModelConfig, Quantization
from legato.core.errors import ConfigError
from legato.model.model import Model
from legato.model.native_kernels import NativeKernels, native_instructions
from legato.model.native_operators import NativeLinear
from legato.model.quantization import BLOCK, QuantizedWeight, quantize_rotated
from legato.model.rotation import rotate
from tests.exactness.logits import chunked_logits, legato_model, natural_tokens
from tests.executor.instructions import TESTED
from tests.executor.test_native import pytestmark as needs_native

pytestmark = needs_native

SHAPES = [(32, 96), (100, 192), (40, 576), (40, 32)]
"""Outputs and depth: whole and partial panels, even and odd numbers of blocks of 32."""
MOST_ROWS = 130


def operands(num_outputs: int, depth: int) -> tuple[torch.Tensor, QuantizedWeight]:
    generator = torch.Generator().manual_seed(depth)
    rows = torch.randn(MOST_ROWS, depth, generator=generator)
    rows[:, 5] *= 40
    rows[7] = 0
    weight = torch.randn(num_outputs, depth, generator=generator)
    return rows.bfloat16(), quantize_rotated(weight)


def in_8_bits(rows: torch.Tensor) -> torch.Tensor:
    """Round rotated rows to whole multiples of the largest value's 127th part."""
    rotated = rotate(rows)
    scales = rotated.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
    return (rotated / scales).round() * scales


@pytest.mark.parametrize("instructions", TESTED)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_every_row_count(instructions: str, shape: tuple[int, int], num_threads: int) -> None:
    """Sums of whole numbers are exact, so a row's result does not depend on the other rows."""
    rows, weight = operands(*shape)
    linear = NativeLinear(weight, NativeKernels(num_threads, instructions))
    whole = linear(rows)
    expected = in_8_bits(rows) @ rotate(weight.dequantize()).T
    # A value halfway between two codes may be rounded to the other one.
    assert float((whole - expected).norm() / expected.norm()) < 1e-3
    for count in range(1, MOST_ROWS):
        assert torch.equal(linear(rows[:count]), whole[:count]), count


@pytest.mark.parametrize("shape", SHAPES)
def test_all_instructions_compute_the_same(shape: tuple[int, int]) -> None:
    rows, weight = operands(*shape)
    first, *others = (NativeLinear(weight, NativeKernels(1, each))(rows) for each in TESTED)
    for other in others:
        assert torch.equal(other, first)


@pytest.mark.parametrize("instructions", TESTED)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(instructions: str, value: float) -> None:
    rows, weight = operands(100, 192)
    linear = NativeLinear(weight, NativeKernels(1, instructions))
    expected = linear(rows)
    rows[11, 20] = value
    got = linear(rows)
    assert not got[11].isfinite().any()
    got[11] = expected[11]
    assert torch.equal(got, expected)


@pytest.mark.parametrize("instructions", TESTED)
def test_the_largest_codes(instructions: str) -> None:
    """Where sums of products in 16 bits would overflow."""
    weight = QuantizedWeight(
        torch.full((32, 4096), 255, dtype=torch.uint8),
        torch.ones(32, 1),
        None,
        8,
        zero=128,
        is_rotated=True,
    )
    weight.codes[::2] = 1
    rotated = torch.ones(3, 4096)
    rotated[1] = -1
    linear = NativeLinear(weight, NativeKernels(1, instructions))
    expected = rotated @ (weight.codes.float() - 128).T
    assert torch.allclose(linear(rotate(rotated).bfloat16()), expected, rtol=1e-5)


def in_blocks(rows: torch.Tensor) -> torch.Tensor:
    """Round each 32 values of a row to whole multiples of the largest one's 127th part."""
    blocks = rows.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(dim=2, keepdim=True).clamp(min=1e-30) / 127
    return ((blocks / scales).round() * scales).flatten(1)


def of_4_bits(num_outputs: int, depth: int, group: int) -> QuantizedWeight:
    shape = num_outputs, depth // group
    return QuantizedWeight(
        torch.randint(16, (num_outputs, depth), dtype=torch.uint8),
        torch.rand(shape).half(),
        torch.randn(shape).half(),
        4,
        rounds_rows=True,
    )


def most_in_blocks(instructions: str) -> int:
    """Return the most rows that are rounded in blocks; more have one scale each."""
    if instructions == "avx2":
        return MOST_ROWS
    return 8 if instructions.endswith("amx") else 64


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("instructions", TESTED)
@pytest.mark.parametrize("group", [16, 32, 96])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_every_row_count_in_blocks(instructions: str, group: int, num_threads: int) -> None:
    most = most_in_blocks(instructions)
    rows = operands(100, 192)[0][:most]
    weight = of_4_bits(100, 192, group)
    linear = NativeLinear(weight, NativeKernels(num_threads, instructions))
    whole = linear(rows)
    assert error(whole, in_blocks(rows) @ weight.dequantize().T) < 1e-3
    for count in range(1, len(rows)):
        assert torch.equal(linear(rows[:count]), whole[:count]), count


@pytest.mark.parametrize("instructions", [each for each in TESTED if each != "avx2"])
@pytest.mark.parametrize("depth", [32, 96, 192, 576])
@pytest.mark.parametrize("group", [16, 32, 96])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_codes_of_4_bits_become_codes_of_8(
    instructions: str, depth: int, group: int, num_threads: int
) -> None:
    """As good as if the weights had been rotated, and rounded to 8 bits, from the first."""
    if depth % group:
        pytest.skip("groups are whole")
    rows, _ = operands(100, depth)
    weight = of_4_bits(100, depth, group)
    linear = NativeLinear(weight, NativeKernels(num_threads, instructions))
    whole = linear(rows)
    exact = rows.float() @ weight.dequantize().T
    rounded = in_8_bits(rows) @ in_8_bits(weight.dequantize()).T
    assert error(whole, rounded) < error(rounded, exact)
    assert error(whole, exact) < 1.1 * error(rounded, exact)
    for count in range(most_in_blocks(instructions) + 1, MOST_ROWS):
        assert torch.equal(linear(rows[:count]), whole[:count]), count


@pytest.mark.parametrize("instructions", TESTED)
@pytest.mark.parametrize("code", [0, 15])
@pytest.mark.parametrize("depth", [64, 96, 256, 2048])
def test_the_largest_rotated_weights(instructions: str, code: int, depth: int) -> None:
    """Where all that is added up in 16 bits is as large as it can be, or nothing at all."""
    num_groups = depth // BLOCK
    scales = torch.rand(64, num_groups) / 15
    minima = torch.full((64, num_groups), -1.0)
    if code:
        minima = 1 - 15 * scales.half().float()
    minima[7], scales[7] = 0.0, 0.0
    weight = QuantizedWeight(
        torch.full((64, depth), code, dtype=torch.uint8),
        scales.half(),
        minima.half(),
        4,
        rounds_rows=True,
    )
    rows = torch.ones(MOST_ROWS, depth).bfloat16()
    got = NativeLinear(weight, NativeKernels(1, instructions))(rows)
    expected = rows.float() @ weight.dequantize().T
    assert torch.allclose(got, expected, rtol=5e-3)


@pytest.mark.parametrize("instructions", TESTED)
def test_the_largest_products_of_a_block(instructions: str) -> None:
    """Where sums in 16 bits are almost full."""
    codes, ones = torch.full((32, 64), 15, dtype=torch.uint8), torch.ones(32, 2).half()
    weight = QuantizedWeight(codes, ones, None, 4, rounds_rows=True)
    rows = torch.ones(8, 64)
    rows[::2] = -1
    linear = NativeLinear(weight, NativeKernels(1, instructions))
    assert torch.allclose(linear(rows.bfloat16()), 960 * rows[:, :1].expand(-1, 32), rtol=1e-5)


@pytest.mark.parametrize("quantization", ["w8a8", "w4a8"])
def test_the_default_models_text_stays_as_likely(quantization: Quantization) -> None:
    assert likelihood(loaded(quantization)) == pytest.approx(exact_likelihood(), abs=0.02)


@cache
def exact_likelihood() -> float:
    return likelihood(legato_model(torch.float32))


def likelihood(model: Model) -> float:
    """Return the mean log-probability of the tokens of a text after the first."""
    tokens = natural_tokens(256)
    logits = chunked_logits(model, tokens, 100, len(tokens))[:-1]
    scores = logits.float().log_softmax(dim=-1)
    return float(scores[torch.arange(len(scores)), torch.tensor(tokens[1:])].mean())


def loaded(quantization: Quantization) -> Model:
    return load_model(
        open_checkpoint(ModelConfig()),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        kernels=NativeKernels(2, native_instructions()[0]),
        quantization=quantization,
    )


@pytest.mark.parametrize("quantization", ["w8a8", "w4a8"])
def test_other_layers_refuse(quantization: Quantization) -> None:
    checkpoint = open_checkpoint(ModelConfig())
    with pytest.raises(ConfigError, match=f"{quantization} needs native kernels"):
        load_model(
            checkpoint, dtype=torch.bfloat16, device=torch.device("cpu"), quantization=quantization
        )
    with pytest.raises(ConfigError, match="8 is for CPUs; a GPU takes int8, int4 and fp8"):
        fill_model(
            lambda: pytest.fail("was built"),
            checkpoint,
            dtype=torch.bfloat16,
            device=torch.device("cuda"),
            quantization=quantization,
        )
