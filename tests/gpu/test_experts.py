"""Mixtures of experts: grouped products against PyTorch's layers, which loop over the experts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from legato.core.errors import ConfigError
from legato.model.decoder import Decoder
from legato.model.experts import Experts
from legato.model.mlp_spec import MoeSpec
from legato.model.quantization import QuantizedWeight, can_quantize, quantize
from legato.model.sharding import shard
from tests.gpu.numbers import assert_near, each_dtype
from tests.gpu.test_weights import load, stands_for
from tests.model.random_models import SIGMOIDS_IN_GROUPS, decoder_spec, random_decoder
from tests.model.test_sharding import Rank

MIXTURES: dict[str, dict[str, Any]] = {
    "softmax": {"is_normalized": False},
    "sigmoids in groups, a shared expert": SIGMOIDS_IN_GROUPS,
    "a shared expert with a gate": {"shared_size": 32, "has_shared_gate": True, "size": 40},
    "limited gates, biases": {
        "num_active": 4,
        "score": "softmax_of_active",
        "has_router_bias": True,
        "has_bias": True,
        "gate_limit": 0.5,
        "gate_slope": 1.702,
    },
    "gelu": {"activation": "gelu_tanh"},
    "no gates": {"activation": "relu2", "is_gated": False, "size": 40, "shared_size": 32},
    "latent rows": {"latent_size": 32, "size": 24, "shared_size": 32, "has_shared_gate": True},
    "all of a few": {"num_experts": 3, "num_active": 3, "size": 24},
}


def mixture_of(decoder: Decoder) -> nn.Module:
    """The last layer's."""
    return decoder.get_submodule("layers.1.mlp")


def computed(decoder: Decoder, rows: torch.Tensor, num_padding: int = 0) -> torch.Tensor:
    """The mixture's output of rows; after them is padding, which nothing reads."""
    from legato.gpu.decoder import _feed_forward

    padding = rows.new_full((num_padding, rows.shape[1]), torch.nan)
    padded = torch.cat([rows, padding]).to(decoder.device)
    slots = torch.arange(len(padded), dtype=torch.int32, device=decoder.device)
    slots[len(rows) :] = -1
    return _feed_forward(mixture_of(decoder), padded, slots)[: len(rows)]


def random_rows(count: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(count)).to(dtype)


@each_dtype
@pytest.mark.parametrize("name", MIXTURES)
def test_computes_what_pytorch_does(device: torch.device, dtype: torch.dtype, name: str) -> None:
    spec = decoder_spec(experts=MIXTURES[name])
    expected = mixture_of(random_decoder(spec, torch.float32))
    decoder = load(random_decoder(spec, dtype), device, lambda _, weight: weight)
    rows = random_rows(9, spec.hidden_size, dtype)
    assert_near(computed(decoder, rows, num_padding=7), expected(rows.float()), dtype)


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
def test_nan_reaches_the_rows_that_pytorch_says(device: torch.device, name: str, part: str) -> None:
    """Through limits of gates and squares, too."""
    reference = random_decoder(decoder_spec(experts=MIXTURES[name]), torch.float32)
    weight = dict(mixture_of(reference).named_parameters())[f"experts.{part}"]
    weight[1, 5, 7] = torch.nan
    decoder = load(reference, device, lambda _, weight: weight)
    rows = random_rows(9, 64)
    expected = mixture_of(reference)(rows).isnan()
    assert expected.any()
    assert computed(decoder, rows).isnan().cpu().equal(expected)


def assert_each_computed(device: torch.device, spec: MoeSpec, picked: torch.Tensor) -> None:
    """Rows by the experts that were picked for them, of sizes that no tile has."""
    from legato.gpu.experts import GpuExperts
    from legato.gpu.kernels.experts import ExpertWeights

    plain = Experts(spec, 40, torch.empty)
    for values in plain.parameters():
        values.copy_(random_rows(values.numel(), 1).view(values.shape) * 0.3)
    assert plain.gate_up_bias is not None
    assert plain.down_bias is not None
    experts = GpuExperts(
        plain,
        ExpertWeights(plain.gate_up_proj.to(device), bias=plain.gate_up_bias.to(device)),
        ExpertWeights(plain.down_proj.to(device), bias=plain.down_bias.to(device)),
    )
    rows, factors = random_rows(len(picked), 40), random_rows(*picked.shape)
    slots = torch.zeros(len(picked), dtype=torch.int32)
    found = experts(*(values.to(device) for values in (rows, picked, factors, slots)))
    for own, row, factor, outputs in zip(picked.tolist(), rows, factors, found, strict=True):
        each = torch.cat([plain._of(expert, row[None]) for expert in own])
        assert_near(outputs, each * factor[:, None], torch.float32)


def test_any_number_of_rows(device: torch.device) -> None:
    """Of three experts, one with most rows and one often without any."""
    spec = MoeSpec(num_experts=3, num_active=1, size=12, has_bias=True)
    for num_rows in range(1, 41):
        picked = torch.tensor([[row * row % 11 % 4 % 3] for row in range(num_rows)])
        assert_each_computed(device, spec, picked)


CHOICES: dict[str, Callable[[int], list[int]]] = {
    "one expert computes all": lambda _: [2],
    "the last one computes all": lambda _: [4],
    "two compute all": lambda _: [3, 1],
    "each row has another": lambda row: [row % 5],
}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("num_rows", [5, 37])
def test_any_choice_of_experts(device: torch.device, name: str, num_rows: int) -> None:
    picked = torch.tensor([CHOICES[name](row) for row in range(num_rows)])
    spec = MoeSpec(num_experts=5, num_active=picked.shape[1], size=24, has_bias=True)
    assert_each_computed(device, spec, picked)


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "num_active"),
    [(1, 1, 1), (1, 128, 8), (16, 6, 2), (40, 6, 2), (300, 64, 8), (700, 3, 3)],
)
def test_each_pair_has_a_place_in_one_tile(
    device: torch.device, num_rows: int, num_experts: int, num_active: int
) -> None:
    """Of the rows that are no padding, in a stable order."""
    from legato.gpu.kernels.experts import sort_by_expert

    generator = torch.Generator().manual_seed(num_rows)
    likely = torch.rand(num_experts, generator=generator) ** 3 + 1e-6
    picked = torch.multinomial(likely.expand(num_rows, -1), num_active, generator=generator)
    slots = torch.randint(-1, 5, (num_rows,), generator=generator, dtype=torch.int32)
    pairs = sort_by_expert(picked.to(device), slots.to(device), num_experts)
    is_real = (slots >= 0).repeat_interleave(num_active)
    expected = picked.flatten().where(is_real, num_experts).argsort(stable=True)
    num_real = int(is_real.sum())
    assert pairs.order[:num_real].tolist() == expected[:num_real].tolist()
    end = 0
    for expert, first, end_of_expert in pairs.tiles.tolist():
        if expert < 0:
            continue
        assert first == end, "tiles follow each other"
        end = min(first + pairs.tile_rows, end_of_expert)
        own = pairs.order[first:end].long().cpu()
        assert len(own)
        assert (picked.flatten()[own] == expert).all()
    assert end == num_real


def as_codes(bits: int) -> Callable[[str, torch.Tensor], QuantizedWeight | torch.Tensor]:
    def change(name: str, weight: torch.Tensor) -> QuantizedWeight | torch.Tensor:
        is_router = name.endswith((".gate.weight", "_gate.weight"))
        return weight if is_router or not can_quantize(weight) else quantize(weight, bits)

    return change


@each_dtype
@pytest.mark.parametrize("bits", [4, 8])
def test_computes_with_codes(device: torch.device, dtype: torch.dtype, bits: int) -> None:
    """What they stand for; and a step reads their bytes."""
    spec = decoder_spec(experts=MIXTURES["limited gates, biases"])
    plain = random_decoder(spec, torch.float32)
    decoder = load(random_decoder(spec, dtype), device, as_codes(bits))
    for name, slot in plain.checkpoint_slots().items():
        slot.copy_(stands_for(as_codes(bits)(name, slot)))
    rows = random_rows(9, spec.hidden_size, dtype)
    assert_near(computed(decoder, rows, num_padding=3), mixture_of(plain)(rows.float()), dtype)
    experts = mixture_of(decoder).get_submodule("experts")
    num_weights = 3 * 6 * 64 * 64
    assert sum(part.nbytes for part in experts.buffers()) < num_weights * (bits + 2) // 8


def test_experts_that_are_quantized_in_part_become_plain(device: torch.device) -> None:
    spec = decoder_spec(experts=MIXTURES["softmax"])
    plain = random_decoder(spec, torch.float32)

    def change(name: str, weight: torch.Tensor) -> QuantizedWeight | torch.Tensor:
        return quantize(weight, 8) if ".experts.3.up_proj" in name else weight

    decoder = load(plain, device, change)
    for name, slot in plain.checkpoint_slots().items():
        slot.copy_(stands_for(change(name, slot)))
    rows = random_rows(9, spec.hidden_size)
    assert_near(computed(decoder, rows), mixture_of(plain)(rows), torch.float32)


@pytest.mark.parametrize("bits", [None, 4])
def test_many_rows_have_large_tiles(device: torch.device, bits: int | None) -> None:
    """Such as those of prompts, in the dtypes that tensor cores take."""
    spec = decoder_spec(hidden_size=96, experts={"num_experts": 2, "num_active": 1, "size": 160})
    plain = random_decoder(spec, torch.float32)
    change = as_codes(bits) if bits else lambda _, weight: weight
    decoder = load(random_decoder(spec, torch.float16), device, change)
    for name, slot in plain.checkpoint_slots().items():
        slot.copy_(stands_for(change(name, slot)))
    rows = random_rows(280, 96, torch.float16) * 0.5
    assert_near(computed(decoder, rows), mixture_of(plain)(rows.float()), torch.float16)


def test_ranks_together_compute_what_one_does(device: torch.device) -> None:
    """Each has a part of every expert; the bias of a sum is rank 0's."""
    from legato.gpu.decoder import GpuDecoder

    spec = decoder_spec(experts={**MIXTURES["limited gates, biases"], "shared_size": 96})
    plain = random_decoder(spec, torch.float32)
    rows = random_rows(5, spec.hidden_size)
    total = torch.zeros_like(rows, device=device)
    for rank in (Rank(0, 2), Rank(1, 2)):
        part = GpuDecoder(spec, dtype=torch.float32, device=device, communicator=rank)
        slots = plain.checkpoint_slots().items()
        part.load_weights((name, shard(name, weight, spec, rank)) for name, weight in slots)
        total += computed(part, rows)
    assert_near(total, mixture_of(plain)(rows), torch.float32)


def test_8_bit_floats_are_refused() -> None:
    from legato.gpu.decoder import GpuDecoder

    spec = decoder_spec(experts={})
    with pytest.raises(ConfigError, match="fp8 does not take experts; int8 and int4 do"):
        GpuDecoder(spec, dtype=torch.bfloat16, device=torch.device("cpu"), is_fp8=True)
