"""Rotated rows and weights: the same products, and an outlier spread over its neighbours."""

import pytest
import torch

from legato.model.quantization import quantize_rotated
from legato.model.rotation import rotate

DEPTHS = (32, 64, 96, 224, 256, 576, 1536)
"""Multiples of 32; some leave 2, 4 or 8 vectors over."""


def randoms(num_rows: int, depth: int) -> torch.Tensor:
    return torch.randn(num_rows, depth, generator=torch.Generator().manual_seed(depth))


@pytest.mark.parametrize("depth", DEPTHS)
def test_products_stay(depth: int) -> None:
    rows, weight = randoms(5, depth), randoms(7, depth)
    rotated = rotate(rows) @ rotate(weight).T
    assert torch.allclose(rotated, rows @ weight.T, rtol=1e-4, atol=1e-4)
    assert torch.allclose(rotate(rotate(rows)), rows, atol=1e-5)


def test_an_outlier_is_spread() -> None:
    rows = torch.zeros(1, 576)
    rows[0, 100] = 16.0
    rotated = rotate(rows)
    assert float(rotated.abs().max()) == 4.0
    assert rotated.nonzero()[:, 1].tolist() == [100 % 16 + 16 * i for i in range(16)]


@pytest.mark.parametrize("depth", DEPTHS)
def test_rounding_errs_by_half_a_code(depth: int) -> None:
    weight = randoms(9, depth)
    weight[3] = 0
    quantized = quantize_rotated(weight)
    assert quantized.group == depth
    step = rotate(weight).abs().amax(dim=1, keepdim=True) / 127
    error = rotate(quantized.dequantize() - weight).abs()
    # The scale is itself rounded, to 11 bits of a product with at most 127.
    assert bool((error <= step * (0.5 + 127 * 2.0**-11) + 1e-5).all())
