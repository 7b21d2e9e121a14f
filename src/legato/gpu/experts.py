"""Experts on a GPU: a fused router, and grouped products of the experts that it picks."""

import torch
import torch.nn.functional as F
from torch import nn

from legato.gpu.kernels.expert_choice import pick_experts
from legato.gpu.kernels.experts import (
    ExpertWeights,
    project_inner,
    project_weighted,
    sort_by_expert,
)
from legato.gpu.linear import packed
from legato.model.experts import ExpertRouter, Experts
from legato.model.quantization import QuantizedWeight


class GpuExperts(nn.Module):
    """The experts of a layer.

    Args:
        plain: the same experts of PyTorch's decoder; only their numbers are read.
        gate_up, down: their weights on the device.
    """

    def __init__(self, plain: Experts, gate_up: ExpertWeights, down: ExpertWeights) -> None:
        super().__init__()
        self._activation = plain.activation
        self._gate_limit, self._gate_slope = plain.gate_limit, plain.gate_slope
        self._num_experts, self._hidden_size, self._size = plain.down_proj.shape
        self._gate_up, self._down = gate_up, down
        for name, weights in (("gate_up", gate_up), ("down", down)):
            for part, values in weights._asdict().items():
                self.register_buffer(f"_{name}_{part}", values)

    def forward(
        self, rows: torch.Tensor, experts: torch.Tensor, factors: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Map rows [T, E] to the outputs of their experts, times the router's weights: [T, A, E].

        Args:
            experts, factors: [T, A] int64 and float32, contiguous, from the router.
            slots: int32 [T], negative for padding, whose outputs are not written.
        """
        pairs = sort_by_expert(experts, slots, self._num_experts)
        inner = rows.new_empty(experts.numel(), self._size)
        project_inner(
            rows,
            pairs,
            self._gate_up,
            inner,
            activation=self._activation,
            limit=self._gate_limit,
            slope=self._gate_slope,
        )
        outputs = rows.new_empty(*experts.shape, self._hidden_size)
        project_weighted(inner, pairs, self._down, factors, outputs)
        return outputs


def route(
    router: ExpertRouter, rows: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts [T, A] int64 and their weights [T, A] float32 of rows [T, E].

    They are those of `router`'s own `forward`, as far as `pick_experts` promises.

    Args:
        slots: int32 [T], negative for padding, which gets no experts.
    """
    logits = F.linear(rows.float(), router.weight)
    experts = rows.new_empty(len(rows), router.spec.num_active, dtype=torch.int64)
    weights = torch.empty_like(experts, dtype=torch.float32)
    pick_experts(
        logits,
        router.spec,
        router.bias,
        router.selection_bias,
        router.expert_scale,
        slots,
        experts,
        weights,
    )
    return experts, weights


def codes_of(weight: QuantizedWeight, num_experts: int, device: torch.device) -> ExpertWeights:
    """Return the weights [X, N, K] of experts from a matrix in blocks of 32, [X * N, K]."""

    def by_expert(part: torch.Tensor) -> torch.Tensor:
        return part.reshape(num_experts, -1, part.shape[1]).to(device).contiguous()

    minima = None if weight.minima is None else by_expert(weight.minima)
    return ExpertWeights(by_expert(packed(weight)), by_expert(weight.scales), minima)
