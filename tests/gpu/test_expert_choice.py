"""The experts of a router, and their weights, against PyTorch's router."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legato.model.experts import ExpertRouter
from legato.model.mlp_spec import MoeSpec
from tests.gpu.numbers import assert_near
from tests.profiles import examples

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"num_experts": 6, "num_active": 2, "is_normalized": False},
    "normalized softmax": {"num_experts": 128, "num_active": 8, "factor": 1.5},
    "softmax of the picked ones, biases": {
        "num_experts": 33,
        "num_active": 4,
        "score": "softmax_of_active",
        "has_router_bias": True,
    },
    "sigmoids, a selection bias, groups": {
        "num_experts": 160,
        "num_active": 8,
        "score": "sigmoid",
        "has_selection_bias": True,
        "num_groups": 8,
        "num_active_groups": 4,
        "factor": 2.5,
    },
    "groups by their best score": {
        "num_experts": 60,
        "num_active": 6,
        "is_normalized": False,
        "num_groups": 3,
        "num_active_groups": 1,
        "group_scores": 1,
        "factor": 16.0,
    },
    "softmax of the picked ones, factors of experts": {
        "num_experts": 12,
        "num_active": 5,
        "score": "softmax_of_active",
        "has_expert_scale": True,
    },
    "all of a few": {"num_experts": 3, "num_active": 3, "score": "sigmoid"},
    "one": {"num_experts": 1, "num_active": 1},
}
"""Fields of `MoeSpec`."""


def make_router(**moe: Any) -> ExpertRouter:
    """A router whose logits, before its bias, are its inputs."""
    spec = MoeSpec(size=8, **moe)
    router = ExpertRouter(spec, spec.num_experts, torch.empty)
    generator = torch.Generator().manual_seed(spec.num_experts)
    for values in router.parameters():
        values.copy_(torch.randn(values.shape, generator=generator))
    router.weight.copy_(torch.eye(spec.num_experts))
    if router.bias is not None:
        router.bias.copy_(quarters(1, spec.num_experts, seed=1)[0])
    return router


def quarters(num_rows: int, num_experts: int, seed: int) -> torch.Tensor:
    """Random logits, many of them equal. Scores are equal only if their logits are.

    Sums with others of these are exact. There are no opposites, whose sigmoids sum to 1.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_rows, num_experts, generator=generator)
    return (values * 4).round() / 4 + 1 / 32


def picked(
    device: torch.device, router: ExpertRouter, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights of rows; after them is padding, for which nothing may be written."""
    from legato.gpu.kernels.expert_choice import pick_experts

    num_rows = len(logits)
    padded = torch.cat([logits, logits.new_full((2, logits.shape[1]), torch.nan)])
    slots = torch.arange(len(padded), dtype=torch.int32)
    slots[num_rows:] = -1
    experts = torch.full((len(padded), router.spec.num_active), -7, device=device)
    weights = torch.full(experts.shape, 7.0, device=device)
    router.to(device)
    pick_experts(
        padded.to(device),
        router.spec,
        router.bias,
        router.selection_bias,
        router.expert_scale,
        slots.to(device),
        experts,
        weights,
    )
    router.cpu()
    assert (experts[num_rows:] == -7).all()
    assert (weights[num_rows:] == 7.0).all()
    return experts[:num_rows].cpu(), weights[:num_rows].cpu()


def assert_picked_as_by_pytorch(
    device: torch.device, router: ExpertRouter, logits: torch.Tensor
) -> None:
    experts, weights = picked(device, router, logits)
    expected_experts, expected_weights = router(logits)
    assert experts.tolist() == expected_experts.tolist()
    assert_near(weights, expected_weights, torch.float32)


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("num_rows", [1, 15])
def test_picks_what_pytorch_does(device: torch.device, name: str, num_rows: int) -> None:
    router = make_router(**ROUTERS[name])
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, router.spec.num_experts, generator=generator)
    assert_picked_as_by_pytorch(device, router, logits)


def test_many_rows(device: torch.device) -> None:
    router = make_router(**ROUTERS["softmax"])
    assert_picked_as_by_pytorch(device, router, quarters(200, 6, seed=1))


@st.composite
def routers(draw: st.DrawFn) -> dict[str, Any]:
    """The fields of any router."""
    num_groups, group_size = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    num_active_groups = draw(st.integers(1, num_groups))
    num_candidates = num_active_groups * group_size
    return {
        "num_experts": num_groups * group_size,
        "num_active": draw(st.integers(1, min(num_candidates, 9))),
        "num_groups": num_groups,
        "num_active_groups": num_active_groups,
        "group_scores": draw(st.integers(1, min(group_size, 3))),
        "score": draw(st.sampled_from(["softmax", "softmax_of_active", "sigmoid"])),
        "factor": draw(st.sampled_from([1.0, 2.5])),
        **{
            name: draw(st.booleans())
            for name in (
                "has_router_bias",
                "has_selection_bias",
                "has_expert_scale",
                "is_normalized",
            )
        },
    }


@examples(12, derandomize=True)
@given(routers(), st.integers(1, 3), st.integers(0, 2**32))
def test_any_router(device: torch.device, moe: dict[str, Any], num_rows: int, seed: int) -> None:
    """With ties."""
    router = make_router(**moe)
    logits = quarters(num_rows, router.spec.num_experts, seed)
    assert_picked_as_by_pytorch(device, router, logits)


@pytest.mark.parametrize("name", ROUTERS)
def test_zeros_of_both_signs_are_equal_and_nan_is_best(device: torch.device, name: str) -> None:
    router = make_router(**ROUTERS[name])
    num_experts, num_active = router.spec.num_experts, router.spec.num_active
    for values in (router.bias, router.selection_bias):
        if values is not None:
            values.zero_()
    logits = torch.zeros(3, num_experts)
    logits[0, 1::2] = -0.0
    logits[1] = torch.nan
    logits[2, -1] = -torch.nan  # with the bit of the sign
    experts, weights = picked(device, router, logits)
    first = list(range(num_active))
    assert experts[:2].tolist() == [first, first]
    assert weights[0].isfinite().all()
    assert weights[1].isnan().all()
    if router.spec.score != "softmax":  # which is NaN for all if one logit is
        first = [num_experts - 1, *first[:-1]]
    assert experts[2].tolist() == first
    assert weights[2, 0].isnan()
