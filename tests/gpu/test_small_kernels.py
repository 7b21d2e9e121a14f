"""What lies between the matrix products, against float64."""

import pytest
import torch
import torch.nn.functional as F

from legato.model.mlp_spec import Activation
from tests.gpu.numbers import assert_near, each_dtype

SIZES = pytest.mark.parametrize("size", [64, 96, 1100])


@each_dtype
@SIZES
@pytest.mark.parametrize("has_delta", [True, False])
def test_adds_and_normalizes(
    device: torch.device, dtype: torch.dtype, size: int, has_delta: bool
) -> None:
    from legato.gpu.kernels.norm import add_rms_norm

    generator = torch.Generator().manual_seed(size)
    residual = torch.randn(5, size, generator=generator).to(device)
    delta = torch.randn(5, size, generator=generator).to(device, dtype) if has_delta else None
    weight = torch.rand(size, generator=generator).to(device)
    summed = residual if delta is None else residual + 0.5 * delta.float()
    expected = F.rms_norm(summed.double(), (size,), weight.double(), 1e-5)

    before = residual.clone()
    rows = torch.tensor([4, 0, 0], dtype=torch.int32, device=device)
    some = torch.empty(3, size, dtype=dtype, device=device)
    add_rms_norm(residual, delta, weight, 1e-5, some, scale=0.5, rows=rows)
    assert residual.equal(before)
    assert_near(some, expected[rows], dtype)

    out = torch.empty(5, size, dtype=dtype, device=device)
    add_rms_norm(residual, delta, weight, 1e-5, out, scale=0.5)
    assert residual.equal(summed)
    assert_near(out, expected, dtype)


@each_dtype
@SIZES
def test_normalizes_columns_in_place(device: torch.device, dtype: torch.dtype, size: int) -> None:
    from legato.gpu.kernels.norm import normalize

    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(5, size + 20, generator=generator).to(device, dtype)
    weight = torch.rand(size, generator=generator).to(device)
    before = rows.clone()
    own = slice(7, 7 + size)
    normalize(rows[:, own], weight, 1e-5)
    expected = F.rms_norm(before[:, own].double(), (size,), weight.double(), 1e-5)
    assert_near(rows[:, own], expected, dtype)
    rows[:, own] = before[:, own]
    assert rows.equal(before), "other columns stay"


@each_dtype
@SIZES
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates(device: torch.device, dtype: torch.dtype, size: int, activation: Activation) -> None:
    from legato.gpu.kernels.activation import apply_gates

    gate_up = torch.randn(3, 2 * size, generator=torch.Generator().manual_seed(size))
    gate_up = gate_up.to(device, dtype)
    out = torch.empty(3, size, dtype=dtype, device=device)
    apply_gates(gate_up, out, activation)
    gate, up = gate_up.double().chunk(2, dim=1)
    expected = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    assert_near(out, expected * up, dtype)


@each_dtype
@SIZES
def test_looks_up_tokens_that_only_the_device_knows(
    device: torch.device, dtype: torch.dtype, size: int
) -> None:
    from legato.gpu.kernels.embedding import embed

    table = torch.randn(30, size, generator=torch.Generator().manual_seed(size)).to(device, dtype)
    input_source = torch.tensor([3, -1, -3, 0], dtype=torch.int32, device=device)
    last_token = torch.tensor([7, 8, 29], dtype=torch.int32, device=device)
    out = torch.empty(4, size, device=device)
    embed(input_source, last_token, table, out)
    assert out.equal(table[[3, 7, 29, 0]].float())
    embed(input_source, last_token, table[5:12], out, scale=0.75, first=5)
    assert out[1].equal(0.75 * table[7].float())
    assert not out[[0, 2, 3]].any(), "of tokens that another rank has"
