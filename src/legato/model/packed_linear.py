"""Projections with weights laid out for the CPU's matrix units.

oneDNN reads a plain weight matrix row by row and rearranges it in every call. Laid out once after
loading, the weights are read a third faster by a step of few rows, which does little else. And an
element-wise operation after a product can run while the result is still in the cache.
"""

from collections.abc import Iterable

import torch
from torch import nn

from legato.model.decoder import Decoder
from legato.model.linear import Linear
from legato.model.mlp import MLP
from legato.model.model import NamedWeights

_SUPPORT = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


class PackedLinear(nn.Module):
    """A `Linear` in oneDNN's own layout. The plain weight is dropped.

    Args:
        activation: oneDNN's name of the function applied to the outputs.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "none"
    ) -> None:
        super().__init__()
        self.in_features = weight.shape[1]
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias
        self._activation = activation

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [T, in] to [T, out]."""
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
            rows, self._weight, self._bias, self._activation, [], ""
        )
        return output


class PackedMLP(nn.Module):
    """An `MLP` with its SiLU and product fused into the projections before them."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        gate_up = mlp.gate_up_proj
        gate, up = gate_up.weight.chunk(2)
        self.in_features = gate.shape[1]
        gate_bias: torch.Tensor | None = None
        self._up_bias: torch.Tensor | None = None
        if gate_up.bias is not None:
            gate_bias, self._up_bias = gate_up.bias.chunk(2)
        self._gate = PackedLinear(gate, gate_bias, activation="swish")
        self._up = torch.ops.mkldnn._reorder_linear_weight(up)
        self._down = PackedLinear(mlp.down_proj.weight, mlp.down_proj.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [T, E] to [T, E]."""
        gated = torch.ops.mkldnn._linear_pointwise.binary(
            hidden, self._gate(hidden), self._up, self._up_bias, "mul"
        )
        output: torch.Tensor = self._down(gated)
        return output


class PackedDecoder(Decoder):
    """A decoder that packs its projections right after loading.

    A tied embedding is kept beside its packed copy.
    """

    @torch.inference_mode()
    def load_weights(self, weights: NamedWeights) -> None:
        super().load_weights(weights)
        _pack_children(self)
        if self.lm_head is None:
            self.lm_head = PackedLinear(self.embed_tokens.weight, None)

    @torch.inference_mode()
    def compile_kernels(self, *, num_rows: Iterable[int], num_samples: Iterable[int]) -> None:
        """Have oneDNN compile kernels for these row counts, so that no step waits for it.

        Layers of one record have the same shapes, so one of them is enough. Experts are not
        packed: their row counts are not known.
        """
        distinct = {record: layer for layer, record in enumerate(self.spec.layers)}
        parts = [self.layers[layer] for layer in distinct.values()]
        if self.layer_inputs is not None:
            parts.append(self.layer_inputs)
        modules = [
            module
            for part in parts
            for module in part.modules()
            if isinstance(module, PackedLinear | PackedMLP)
        ]
        calls = [(module, count) for module in modules for count in num_rows]
        if isinstance(self.lm_head, PackedLinear):
            calls += [(self.lm_head, count) for count in num_samples]
        for module, count in calls:
            module(self.embed_tokens.weight.new_zeros(count, module.in_features))


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this is a CPU with fast products in `dtype`."""
    is_supported = _SUPPORT.get(dtype)
    if device.type != "cpu" or is_supported is None or not torch.backends.mkldnn.enabled:
        return False
    return bool(getattr(torch.ops.mkldnn, is_supported)())


def _pack_children(module: nn.Module) -> None:
    for name, child in list(module.named_children()):
        if isinstance(child, MLP) and child.activation == "silu" and child.gate_scale == 1.0:
            setattr(module, name, PackedMLP(child))
        elif isinstance(child, Linear):
            setattr(module, name, PackedLinear(child.weight, child.bias))
        else:
            _pack_children(child)
