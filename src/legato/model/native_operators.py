"""Native products and gated MLPs, one at a time, in layers that PyTorch runs. Rows are bfloat16."""

from typing import Any

import torch
from torch import nn

from legato.model.native import NativeKernels, NativeLinear
from legato.model.quantization import QuantizedWeight

_DTYPE = torch.bfloat16
PANEL = 32
"""Outputs that are computed together."""


class NativeProduct(nn.Module):
    """A projection.

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
            weight = weight.to(_DTYPE).contiguous()
        self._linear = NativeLinear(weight, kernels)
        self._operators = kernels.operators
        self._bias = None if bias is None else bias.float()
        self._dtype = dtype
        self.num_outputs = weight.shape[0]
        self.is_rounded = dtype == _DTYPE and self.num_outputs % PANEL == 0

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
