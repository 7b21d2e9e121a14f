"""Weight-only quantization: codes of 4 or 8 bits; 32 adjacent weights share scale and minimum.

The blocks are those of llama.cpp's Q8_0, Q4_0 and Q4_1, whose weights are therefore kept unchanged;
other weights are rounded to the nearest code.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import torch

BLOCK = 32
"""Weights that share a scale and a minimum."""
_ROWS_A_TIME = 256
_LARGEST_CODE = {4: 15, 8: 255}
_SMALLEST_HALF = 2.0**-24


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix [N, K] of weights `scale * code + minimum`.

    Attributes:
        codes: uint8 [N, K], below 2**bits.
        scales: float16 [N, K / BLOCK].
        minima: float16 [N, K / BLOCK].
        bits: of a code.
        is_stored_only: whether only the file is quantized, and the model computes with the
            dequantized weight.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor
    bits: int
    is_stored_only: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that a step reads; of the dequantized weight in `dtype` if it is stored only."""
        if self.is_stored_only:
            return self.codes.numel() * dtype.itemsize
        return self.codes.numel() * self.bits // 8 + 4 * self.scales.numel()

    def dequantize(self) -> torch.Tensor:
        """Return the weight as float32 [N, K]."""
        blocks = _blocks(self.codes)
        blocks = blocks * self.scales[..., None].float() + self.minima[..., None].float()
        return blocks.flatten(1)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "QuantizedWeight":
        """Apply `change`, which may move rows, to each part."""
        return replace(
            self,
            codes=change(self.codes),
            scales=change(self.scales),
            minima=change(self.minima),
        )


def plain(weight: torch.Tensor | QuantizedWeight) -> torch.Tensor:
    """Return the weight, dequantized if necessary."""
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


def copy_plain(weight: torch.Tensor | QuantizedWeight, out: torch.Tensor) -> None:
    """Write `plain(weight)` into `out`, with only a few rows in memory at a time."""
    if not isinstance(weight, QuantizedWeight):
        out.copy_(weight)
        return
    for first in range(0, len(out), _ROWS_A_TIME):
        rows = slice(first, first + _ROWS_A_TIME)
        out[rows].copy_(weight.map(itemgetter(rows)).dequantize())


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Concatenate rows; the result has the bits of the widest weight."""
    return QuantizedWeight(
        torch.cat([weight.codes for weight in weights]),
        torch.cat([weight.scales for weight in weights]),
        torch.cat([weight.minima for weight in weights]),
        max(weight.bits for weight in weights),
        weights[0].is_stored_only,
    )


def can_quantize(weight: torch.Tensor) -> bool:
    """Whether the weight is a matrix of whole blocks."""
    return weight.ndim == 2 and weight.shape[1] % BLOCK == 0


def quantize(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    """Round a matrix [N, K] to the nearest codes of `bits` bits, 4 or 8.

    8-bit codes are centred on zero, as in Q8_0; 4-bit codes span the block's smallest to largest
    weight, as in Q4_1.
    """
    blocks = _blocks(weight)
    if bits == 8:
        scales = (blocks.abs().amax(dim=-1) / 127).half()
        minima = (-128 * scales.float()).half()
    else:
        low, high = blocks.aminmax(dim=-1)
        scales = ((high - low) / _LARGEST_CODE[bits]).half()
        minima = low.half()
    steps = scales.float().clamp(min=_SMALLEST_HALF)
    codes = (blocks - minima.float()[..., None]) / steps[..., None]
    codes = codes.round().clamp(0, _LARGEST_CODE[bits]).to(torch.uint8)
    return QuantizedWeight(codes.flatten(1), scales, minima, bits)


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """Reshape [N, K] to float32 [N, K / BLOCK, BLOCK]."""
    return values.float().reshape(len(values), -1, BLOCK)
