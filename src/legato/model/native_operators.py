"""Native norms, products, gated MLPs and mixtures of experts, one at a time.

Rows are bfloat16 where no other dtype is named.
"""

from typing import Any

import torch
from torch import nn

from legato.model.mlp_spec import MoeSpec
from legato.model.native_experts import expert_numbers
from legato.model.native_kernels import NativeKernels
from legato.model.native_weights import (
    DTYPE,
    PANEL,
    Weight,
    addresses_of,
    join,
    take_experts,
    weight_addresses,
)
from legato.model.quantization import QuantizedWeight


class NativeNorm(nn.Module):
    """An RMS norm of the last dimension. Attributes: weight: float32 [E], a multiple of 16."""

    def __init__(self, weight: torch.Tensor, eps: float, kernels: NativeKernels) -> None:
        super().__init__()
        self.weight, self._eps = weight, eps
        self._operators = kernels.operators

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalize rows of bfloat16 or float32 to bfloat16, same shape."""
        rows = rows.contiguous()
        out = torch.empty(rows.shape, dtype=DTYPE)
        size = len(self.weight)
        self._operators.normalize(
            rows.data_ptr(),
            rows.dtype == DTYPE,
            rows.numel() // size,
            size,
            self.weight.data_ptr(),
            self._eps,
            out.data_ptr(),
        )
        return out


class NativeLinear:
    """A projection without bias and with float32 outputs. Attributes: native: the packed matrix."""

    def __init__(self, weight: torch.Tensor | QuantizedWeight, kernels: NativeKernels) -> None:
        self._pool = kernels.pool
        self._num_outputs, depth = weight.shape
        packed = join([weight])
        self.native = kernels.extension.Matrix(
            weight_addresses("weight", packed), self._num_outputs, depth
        )

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [T, in] to [T, out] float32."""
        rows = rows.contiguous()
        out = torch.empty(len(rows), self._num_outputs)
        self.native.multiply(self._pool, rows.data_ptr(), len(rows), out.data_ptr())
        return out


class NativeProduct(nn.Module):
    """A projection with a bias, or without, as a module of layers that PyTorch runs.

    Args:
        weight: [out, in].
        bias: [out].
        dtype: of the results. Sums are rounded to bfloat16 at once, unless it is float32.
    """

    def __init__(
        self,
        weight: torch.Tensor | QuantizedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        kernels: NativeKernels,
    ) -> None:
        super().__init__()
        if isinstance(weight, torch.Tensor):
            weight = weight.to(DTYPE).contiguous()
        self._linear = NativeLinear(weight, kernels)
        self._operators = kernels.operators
        self._bias = None if bias is None else bias.float()
        self._dtype = dtype
        self.num_outputs = weight.shape[0]
        self.is_rounded = dtype == DTYPE and self.num_outputs % PANEL == 0

    @property
    def parts(self) -> tuple[Any, int]:
        """The packed matrix, and the address of the biases, 0 for none."""
        return self._linear.native, 0 if self._bias is None else self._bias.data_ptr()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [..., in] to [..., out]."""
        if not self.is_rounded:
            products = self._linear(rows.flatten(0, -2))
            if self._bias is not None:
                products += self._bias
            return products.to(self._dtype).view(*rows.shape[:-1], -1)
        rows, num_rows = rows.contiguous(), rows.numel() // rows.shape[-1]
        out = rows.new_empty(*rows.shape[:-1], self.num_outputs)
        self._operators.project(*self.parts, rows.data_ptr(), num_rows, out.data_ptr())
        return out


class NativeMLP(nn.Module):
    """`down(act(gate) * up)` of three rounded projections, as wide as its inputs.

    Args:
        is_gelu: the activation is GELU's tanh form, not SiLU.
    """

    def __init__(
        self,
        gate: NativeProduct,
        up: NativeProduct,
        down: NativeProduct,
        *,
        is_gelu: bool,
        kernels: NativeKernels,
    ) -> None:
        super().__init__()
        self._products = gate, up, down
        self._parts = [part for product in self._products for part in product.parts]
        self._is_gelu = is_gelu
        self._operators = kernels.operators

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [..., E] to [..., E]."""
        rows, num_rows = rows.contiguous(), rows.numel() // rows.shape[-1]
        out = torch.empty_like(rows)
        self._operators.run_mlp(
            *self._parts, self._is_gelu, rows.data_ptr(), num_rows, out.data_ptr()
        )
        return out


def pack_experts(
    moe: MoeSpec, hidden_size: int, weights: dict[str, Weight], kernels: NativeKernels
) -> Any:
    """Return the extension's router and experts of a layer.

    Args:
        weights: of the router, the experts and the gate of the expert for all rows, which are taken
            out. Key the name in a layer of a checkpoint.
    """
    numbers = {
        "hidden_size": hidden_size,
        "is_gelu": moe.activation == "gelu_tanh",
        **expert_numbers(moe),
    }
    packed = take_experts(weights)
    assert not weights, f"native experts do not know {', '.join(weights)}"
    return kernels.extension.Experts(numbers, addresses_of(packed, moe))


class NativeMixture(nn.Module):
    """A mixture of experts: the router and the experts that it picks are one call.

    Args:
        experts: of `pack_experts`.
        shared: the expert for all rows, from [T, E] to [T, E]; None if there is none.
    """

    def __init__(self, experts: Any, shared: nn.Module | None, kernels: NativeKernels) -> None:
        super().__init__()
        self._experts = experts
        self._operators = kernels.operators
        self.shared_expert = shared

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [T, E] to [T, E]."""
        rows = rows.contiguous()
        out = torch.empty_like(rows)
        shared = None if self.shared_expert is None else self.shared_expert(rows)
        self._operators.run_experts(
            self._experts,
            rows.data_ptr(),
            len(rows),
            0 if shared is None else shared.data_ptr(),
            out.data_ptr(),
        )
        return out
