"""Experts on a GPU: grouped products for the experts that PyTorch's router picks."""

import torch
from torch import nn

from legato.gpu.kernels.experts import (
    ExpertWeights,
    project_gated,
    project_weighted,
    sort_by_expert,
)
from legato.gpu.linear import packed
from legato.model.experts import Experts
from legato.model.quantization import QuantizedWeight


class GpuExperts(nn.Module):
    """The experts of a layer.

    Args:
        plain: the same experts of PyTorch's decoder; only their numbers are read.
        gate_up, down: their weights on the device.
    """

    def __init__(self, plain: Experts, gate_up: ExpertWeights, down: ExpertWeights) -> None:
        super().__init__()
        self._gate_limit, self._gate_slope = plain.gate_limit, plain.gate_slope
        self._num_experts, self._hidden_size, self._size = plain.down_proj.shape
        self._gate_up, self._down = gate_up, down
        for name, weights in (("gate_up", gate_up), ("down", down)):
            for part, values in weights._asdict().items():
                self.register_buffer(f"_{name}_{part}", values)

    def forward(
        self,
        rows: torch.Tensor,
        experts: torch.Tensor,
        factors: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Map rows [T, E] to the outputs of their experts, times the router's weights: [T, A, E].

        Args:
            experts, factors: [T, A] int64 and float32, from the router.
            slots: int32 [T], negative for padding, whose outputs are not written.
        """
        pairs = sort_by_expert(experts.contiguous(), slots, self._num_experts)
        inner = rows.new_empty(experts.numel(), self._size)
        project_gated(
            rows, pairs, self._gate_up, inner, limit=self._gate_limit, slope=self._gate_slope
        )
        outputs = rows.new_empty(*experts.shape, self._hidden_size)
        project_weighted(inner, pairs, self._down, factors.contiguous(), outputs)
        return outputs


def codes_of(weight: QuantizedWeight, num_experts: int, device: torch.device) -> ExpertWeights:
    """Return the weights [X, N, K] of experts from a matrix in blocks of 32, [X * N, K]."""
    assert weight.minima is not None
    values, scales, minima = (
        part.reshape(num_experts, -1, part.shape[1]).to(device).contiguous()
        for part in (packed(weight), weight.scales, weight.minima)
    )
    return ExpertWeights(values, scales, minima)
