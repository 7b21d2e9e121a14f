"""Projections with weights in another format than the model's dtype."""

import torch
import torch.nn.functional as F
from torch import nn

from legato.gpu.kernels.quantized import dequantize, multiply, round_gated_rows, round_rows
from legato.model.mlp_spec import Activation
from legato.model.quantization import BLOCK, QuantizedWeight
from legato.model.quantized_forms import in_blocks

_HALF = BLOCK // 2
MOST_ROWS = 512
"""Most rows of a product with codes; for more rows, dequantizing the matrix first is less work."""

MOST_FAST_DEPTH = 16_384
"""Most products of 8-bit floats that a Hopper adds fast: the sum keeps 13 bits after the first.
The error is then less than a tenth of that of rounding to 8 bits."""


class QuantizedLinear(nn.Module):
    """A projection that keeps its weights quantized, so that a step reads only codes.

    A few rows, such as those of decodes, are multiplied with the codes directly. For more rows, and
    for float32, which tensor cores lack, the weights are dequantized to the rows' dtype first.
    """

    def __init__(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, device: torch.device
    ) -> None:
        super().__init__()
        blocks = in_blocks(weight)
        assert blocks is not None, "the loader widens weights of other forms"
        minima = None if blocks.minima is None else blocks.minima.to(device).contiguous()
        self.register_buffer("_codes", packed(weight).to(device))
        self.register_buffer("_scales", blocks.scales.to(device).contiguous())
        self.register_buffer("_minima", minima)
        self.register_buffer("_bias", bias)
        self._codes: torch.Tensor
        self._scales: torch.Tensor
        self._minima: torch.Tensor | None
        self._bias: torch.Tensor | None
        self.shape = weight.shape

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [T, in] to [T, out]."""
        weight = (self._codes, self._scales, self._minima)
        if len(rows) > MOST_ROWS or rows.dtype == torch.float32:
            plain = rows.new_empty(self.shape)
            dequantize(*weight, plain)
            return F.linear(rows, plain, self._bias)
        out = rows.new_empty(len(rows), self.shape[0])
        multiply(rows, *weight, self._bias, out)
        return out


class Fp8Linear(nn.Module):
    """A projection in 8-bit floats, with a scale for each output and for each input row.

    Args:
        values: float8_e4m3fn [out, in], both multiples of 16, on the device.
        scales: float32 [out, 1].
    """

    def __init__(
        self, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.register_buffer("_values", values)
        self.register_buffer("_scales", scales.t().contiguous())
        self.register_buffer("_bias", bias)
        self._values: torch.Tensor
        self._scales: torch.Tensor
        self._bias: torch.Tensor | None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [T, in] to [T, out]."""
        return self._product(*rounded(rows), rows.dtype)

    def of_gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Map [T, 2 * in], gates first, to [T, out] of their activation times the others."""
        return self._product(*rounded(gate_up, activation), gate_up.dtype)

    def _product(
        self, values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        output: torch.Tensor = torch._scaled_mm(
            values,
            self._values.t(),
            scale_a=scales,
            scale_b=self._scales,
            out_dtype=dtype,
            use_fast_accum=values.shape[1] <= MOST_FAST_DEPTH,
        )
        return output if self._bias is None else output.add_(self._bias)


def rounded(
    rows: torch.Tensor, activation: Activation | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float8_e4m3fn [T, K], and their factors, float32 [T, 1].

    Args:
        rows: [T, K]; or [T, 2K], whose gates are applied first if there is an activation.
    """
    count, size = rows.shape
    values = rows.new_empty(
        count, size if activation is None else size // 2, dtype=torch.float8_e4m3fn
    )
    scales = rows.new_empty(count, 1, dtype=torch.float32)
    if activation is None:
        round_rows(rows, values, scales)
    else:
        round_gated_rows(rows, values, scales, activation)
    return values, scales


def packed(weight: QuantizedWeight) -> torch.Tensor:
    """Return its codes in the layout of `legato.gpu.kernels.quantized.multiply`."""
    if weight.bits == 8:
        return weight.codes.contiguous().view(torch.int8 if weight.is_float8 else torch.uint8)
    halves = weight.codes.reshape(len(weight.codes), -1, 2, _HALF)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
