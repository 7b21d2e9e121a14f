"""Mixtures of experts in native layers: what the extension computes, and its names of weights."""

import msgspec
import torch

from legato.model.mlp_spec import MlpSpec, MoeSpec
from legato.model.quantization import QuantizedWeight, plain
from legato.model.support import Rule, anything, one_of, switch

_TILE_DEPTH = 32
_SCORES = ("softmax", "softmax_of_active", "sigmoid")
"""In the order of the extension's `Score`."""

Weight = torch.Tensor | QuantizedWeight


def _is_multiple(size: int | None) -> bool:
    return (size or 0) % _TILE_DEPTH == 0


EXPERT_RULES = {
    "num_experts": anything(),
    "num_active": anything(),
    "size": Rule(lambda moe: _is_multiple(moe.size), f"a multiple of {_TILE_DEPTH}"),
    "activation": one_of("activation", "silu", "gelu_tanh"),
    "is_gated": one_of("is_gated", True),
    "gate_limit": anything(),
    "gate_slope": anything(),
    "has_bias": switch("has_bias"),
    "score": one_of("score", *_SCORES),
    "has_router_bias": switch("has_router_bias"),
    "has_selection_bias": switch("has_selection_bias"),
    "num_groups": anything(),
    "num_active_groups": anything(),
    "group_scores": one_of("group_scores", 2),
    "is_normalized": switch("is_normalized"),
    "factor": anything(),
    "scales_input": one_of("scales_input", False),
    "has_expert_scale": one_of("has_expert_scale", False),
    "shared_size": Rule(
        lambda moe: _is_multiple(moe.shared_size), f"none or a multiple of {_TILE_DEPTH}"
    ),
    "has_shared_gate": switch("has_shared_gate"),
    "latent_size": one_of("latent_size", None),
}
"""What native layers compute of `MoeSpec`."""


def _has_known_activation(moe: MoeSpec) -> bool:
    return moe.activation in (("silu", "gelu_tanh") if moe.is_gated else ("relu2",))


LONE_EXPERT_RULES = {
    **EXPERT_RULES,
    "activation": Rule(_has_known_activation, "silu or gelu_tanh with gates, or relu2 without"),
    "is_gated": switch("is_gated"),
    "shared_size": anything(),
}
"""What the extension computes of `MoeSpec` apart from the rest of a layer."""


def num_expert_weights(moe: MoeSpec) -> int:
    """Return the number of weights of a mixture in checkpoints, without its MLP for all rows."""
    num_router = 1 + moe.has_router_bias + moe.has_selection_bias + moe.has_shared_gate
    return num_router + (2 + moe.is_gated) * (1 + moe.has_bias) * moe.num_experts


def expert_numbers(mlp: MlpSpec | MoeSpec) -> dict[str, float]:
    """Return a layer's numbers about its MLP or its experts, by the extension's names."""
    if isinstance(mlp, MlpSpec):
        return {"mlp_size": mlp.size}
    return {
        "mlp_size": mlp.shared_size or 0,
        "num_experts": mlp.num_experts,
        "num_active": mlp.num_active,
        "expert_size": mlp.size,
        "num_groups": mlp.num_groups,
        "num_active_groups": mlp.num_active_groups,
        "score": _SCORES.index(mlp.score),
        "is_normalized": mlp.is_normalized,
        "factor": mlp.factor,
        "is_gated": mlp.is_gated,
        "gate_limit": mlp.gate_limit or 0.0,
        "gate_slope": mlp.gate_slope,
    }


def take_router(own: dict[str, Weight]) -> dict[str, Weight]:
    """Take a layer's router out of `own`, and return its parts by the extension's names.

    The extension multiplies with bfloat16. The part of a weight that bfloat16 cannot hold is added
    as rows of its own, so that the router's choice is that of float32.
    """
    weight = plain(own.pop("mlp.gate.weight")).float()
    rounded = weight.bfloat16()
    rest = (weight - rounded.float()).bfloat16()
    router: dict[str, Weight] = {"router": torch.cat([rounded, rest]) if rest.any() else rounded}
    for name, part in {
        "router_bias": "mlp.gate.bias",
        "selection_bias": "mlp.gate.selection_bias",
        "shared_gate": "mlp.shared_expert_gate.weight",
    }.items():
        if part in own:
            router[name] = plain(own.pop(part)).float().flatten()
    return router


def same_experts(mlps: set[MlpSpec | MoeSpec | None]) -> bool:
    """Whether all layers with experts have the same, which share working memory."""
    return sum(isinstance(mlp, MoeSpec) for mlp in mlps) <= 1


def has_computed_order(layer: msgspec.Struct) -> bool:
    """Whether a layer with experts has norms only where the extension expects them."""
    mlp, order = layer.mlp, layer.order  # type: ignore[attr-defined]
    return order in ("pre", "post", "sandwich") and (order == "pre" or isinstance(mlp, MlpSpec))
