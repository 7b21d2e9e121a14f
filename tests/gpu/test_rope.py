"""Norm, rotation and cache writes in one kernel, against the layers that do them one by one."""

import pytest
import torch

from legato.executor.attention.rounding import mix
from legato.gpu.kernels.mixing import mix_heads
from legato.gpu.kernels.rope import rope_table, rotate_and_write
from legato.model.linear import RMSNorm
from legato.model.model import SCALE_BYTES
from legato.model.rope import RopeFrequencies, RotaryEmbedding, rotate
from tests.gpu.numbers import assert_near, each_dtype
from tests.gpu.paged import quantized_cache

BLOCK_SIZE = 16


def _norm(head_dim: int, generator: torch.Generator) -> RMSNorm:
    norm = RMSNorm(head_dim, 1e-6, lambda size: torch.empty(size, dtype=torch.float64))
    norm.weight.data = torch.randn(head_dim, generator=generator).double()
    return norm


@pytest.mark.parametrize(
    ("has_norm", "is_norm_last"),
    [(False, False), (True, False), (True, True)],
    ids=["no norm", "norm", "norm last"],
)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 24), (3, 3, 32)])
@each_dtype
def test_queries_turn_and_keys_and_values_are_written(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    has_norm: bool,
    is_norm_last: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    random = torch.Generator().manual_seed(1)
    inverse = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    positions = torch.tensor([0, 7, 8, 131_000, 5, 0], dtype=torch.int32)
    slots = torch.tensor([3, 40, 41, 95, 16, -1], dtype=torch.int32)
    heads = torch.randn(6, num_heads + 2 * num_kv_heads, head_dim, generator=random).to(dtype)
    caches = torch.full((2, 6, num_kv_heads, BLOCK_SIZE, head_dim), 9.0, dtype=dtype)
    norms = [_norm(head_dim, random) for _ in range(2)] if has_norm else None

    qkv = heads.flatten(1).clone().to(device)
    key_cache, value_cache = on_device = caches.clone().to(device)
    query = rotate_and_write(
        qkv,
        rope_table(positions.to(device), inverse.to(device), 0.5),
        slots.to(device),
        key_cache,
        value_cache,
        **(
            {
                "q_norm": norms[0].weight.float().to(device),
                "k_norm": norms[1].weight.float().to(device),
                "eps": 1e-6,
                "is_norm_last": is_norm_last,
            }
            if norms
            else {}
        ),
    )

    parts = heads.double().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    q, k, v = parts
    angles = RopeFrequencies(tuple(inverse.tolist()), 0.5)
    turns = RotaryEmbedding(angles, torch.device("cpu"))(positions, torch.float64)
    if is_norm_last:
        q, k = (rotate(rows, turns.cos, turns.sin) for rows in (q, k))
    if norms:
        q, k = (
            torch.nn.functional.rms_norm(rows, (head_dim,), norm.weight, 1e-6)
            for rows, norm in ((q, norms[0]), (k, norms[1]))
        )
    if not is_norm_last:
        q, k = (rotate(rows, turns.cos, turns.sin) for rows in (q, k))
    assert_near(query, q, dtype)
    for row, slot in enumerate(slots.tolist()[:-1]):
        caches[0, slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = k[row].to(dtype)
        caches[1, slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = v[row].to(dtype)
    assert_near(on_device[0], caches[0], dtype)
    assert torch.equal(on_device[1].cpu(), caches[1])


@pytest.mark.parametrize("head_dim", [32, 24, 80])
def test_keys_and_values_are_rounded_to_8_bits(head_dim: int, device: torch.device) -> None:
    """As on a CPU, after they are mixed; a row that is not finite is none in the cache either."""
    random = torch.Generator().manual_seed(2)
    num_kv_heads = 2
    heads = torch.randn(3, 4, num_kv_heads, head_dim, generator=random)
    heads[0, 2, 0] = 0.0
    heads[1, 3, 1, 5] = torch.inf
    heads[2, 2, :, 7] = 50.0
    slots = torch.tensor([17, 3, 4], dtype=torch.int32, device=device)
    plain = torch.zeros(2, 2, num_kv_heads, BLOCK_SIZE, head_dim)
    cache = torch.stack([quantized_cache(part) for part in plain]).to(device)
    table = torch.stack([torch.ones(3, head_dim // 2), torch.zeros(3, head_dim // 2)], dim=1)
    rows = heads.flatten(1).clone().to(device)
    query = rotate_and_write(rows, table.to(device), slots, *cache)

    assert_near(query, mix(heads[:, :2].flatten(1, 2)), torch.float32)
    for row, slot in enumerate(slots.tolist()):
        plain[:, slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = mix(heads[row, 2:])
    expected = torch.stack([quantized_cache(part) for part in plain])
    # A number that is nearly half way between two codes may get either: sums have another order.
    codes, scales = _parts(cache.cpu())
    wanted_codes, wanted_scales = _parts(expected)
    is_finite = ~wanted_scales.isnan()
    assert torch.equal(scales.isnan(), ~is_finite)
    assert_near(scales[is_finite], wanted_scales[is_finite], torch.float32)
    by_token = (*is_finite.shape, head_dim)
    errors = (codes.int() - wanted_codes.int()).view(by_token)[is_finite].abs()
    assert int(errors.max()) <= 1
    assert float(errors.float().mean()) < 0.001


@pytest.mark.parametrize("head_dim", [16, 24, 64, 80, 96, 128, 256])
@each_dtype
def test_heads_are_mixed(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    random = torch.Generator().manual_seed(3)
    heads = torch.randn(5, 3, head_dim, generator=random).to(dtype)
    mixed = heads.to(device, copy=True)
    mix_heads(mixed)
    assert_near(mixed, mix(heads.float()), dtype)


def _parts(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and the scales of a quantized cache."""
    heads = cache.flatten(-2)
    num_codes = heads.shape[-1] - BLOCK_SIZE * SCALE_BYTES
    return heads[..., :num_codes], heads[..., num_codes:].view(torch.float32)
