"""Weight-only quantization: codes of 4 or 8 bits; adjacent weights share a scale.

All formats of checkpoints that stay quantized have one form, `QuantizedWeight`. Weights that are
quantized here have the blocks of llama.cpp's Q8_0 and Q4_1, rounded to the nearest code.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import torch

from legato.model.rotation import rotate

BLOCK = 32
"""Weights that share a scale and a minimum, of weights that are quantized here."""
FLOAT8_TABLE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""Numbers of the codes of 8-bit floats, e4m3fn."""
_ROWS_A_TIME = 256
_LARGEST_CODE = {4: 15, 8: 255}
_SMALLEST_HALF = 2.0**-24
_NUM_BYTES_A_SCALE = 2
_FLOAT8_CODES = 256
_SIGNED_ZERO = 128
"""Added to signed numbers of 8 bits."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix [N, K] of weights `scale * (number - zero) + minimum`.

    Attributes:
        codes: uint8 [N, K], below 2**bits. A number is a code, or the table's entry for it.
        scales: float16 or float32 [N, K / group].
        minima: of the same dtype and shape; None if all are 0.
        bits: of a code, 4 or 8.
        is_stored_only: whether only the file is quantized, and the model computes with the
            dequantized weight.
        zero: the number of weight 0, if there are no minima.
        table: float32 or uint8 [16], float32 [256] of 8-bit floats; None if codes are numbers.
        order: int32 [K], the input that each column multiplies; None for inputs in their order.
        exponent: the weight is 2**exponent times as large.
        rounds_rows: whether rows that it multiplies are rounded to 8 bits however many there are:
            in blocks of 32, or many rows as if the weight were rotated.
        is_rotated: whether codes stand for the rotated weight (`legato.model.rotation`), with one
            scale a row. Rows that it multiplies are rotated, too, and rounded to 8 bits.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    bits: int
    is_stored_only: bool = False
    zero: int = 0
    table: torch.Tensor | None = None
    order: torch.Tensor | None = None
    exponent: int = 0
    rounds_rows: bool = False
    is_rotated: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def group(self) -> int:
        """Adjacent weights that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def is_float8(self) -> bool:
        return self.table is not None and len(self.table) == _FLOAT8_CODES

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that a step reads; of the dequantized weight in `dtype` if it is stored only."""
        if self.is_stored_only:
            return self.codes.numel() * dtype.itemsize
        num_scales = self.scales.numel() * (1 if self.minima is None else 2)
        return self.codes.numel() * self.bits // 8 + _NUM_BYTES_A_SCALE * num_scales

    def dequantize(self) -> torch.Tensor:
        """Return the weight as float32 [N, K]. Few rows are computed at a time, to save memory."""
        weight = torch.empty(self.shape, device=self.parts[0].device)
        copy_plain(self, weight)
        return weight

    def _dequantized(self) -> torch.Tensor:
        """Return the weight as float32 [N, K], with several times its memory while it computes."""
        # As a uint8 index is a mask, a table is indexed by int32.
        numbers = self.codes if self.table is None else self.table[self.codes.int()]
        numbers = numbers.float()
        if self.zero:
            numbers -= self.zero
        blocks = numbers.reshape(len(numbers), -1, self.group)
        blocks *= self.scales[..., None].float()
        if self.minima is not None:
            blocks += self.minima[..., None].float()
        if self.exponent:
            blocks *= 2.0**self.exponent
        weight: torch.Tensor = blocks.flatten(1)
        if self.is_rotated:
            return rotate(weight)
        if self.order is None:
            return weight
        in_order = torch.empty_like(weight)
        in_order[:, self.order.long()] = weight
        return in_order

    def split(self) -> "QuantizedWeight":
        """Return the same weight with its codes, scales and minima apart."""
        return self

    def in_columns(self, _size: int) -> "QuantizedWeight":
        """Return the same weight, which can be cut after each `_size` columns."""
        return self

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The tensors with as many rows as the matrix."""
        minima = () if self.minima is None else (self.minima,)
        return (self.codes, self.scales, *minima)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "QuantizedWeight":
        """Apply `change`, which may move rows or take whole groups, to each part."""
        return replace(
            self,
            codes=change(self.codes),
            scales=change(self.scales),
            minima=None if self.minima is None else change(self.minima),
        )


def plain(weight: torch.Tensor | QuantizedWeight) -> torch.Tensor:
    """Return the weight, dequantized if necessary."""
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


def held_bytes(weight: torch.Tensor | QuantizedWeight) -> int:
    """Return the memory of the weight: a code takes a byte until it is packed."""
    parts = weight.parts if isinstance(weight, QuantizedWeight) else (weight,)
    return sum(part.nbytes for part in parts)


def copy_plain(weight: torch.Tensor | QuantizedWeight, out: torch.Tensor) -> None:
    """Write `plain(weight)` into `out`, with only a few rows in memory at a time."""
    if not isinstance(weight, QuantizedWeight):
        out.copy_(weight)
        return
    for rows in few_rows(len(out)):
        out[rows].copy_(weight.map(itemgetter(rows))._dequantized())


def can_quantize(weight: torch.Tensor) -> bool:
    """Whether the weight is a matrix of whole blocks."""
    return weight.ndim == 2 and weight.shape[1] % BLOCK == 0


def quantize(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    """Round a matrix [N, K] to the nearest codes of `bits` bits, 4 or 8.

    8-bit codes are centred on zero, as in Q8_0; 4-bit codes span the block's smallest to largest
    weight, as in Q4_1. Few rows are computed at a time: in float32 they take eight times as much
    memory as in bfloat16.
    """
    return _by_rows(partial(_quantized, bits=bits), weight)


def quantize_rotated(weight: torch.Tensor) -> QuantizedWeight:
    """Rotate a matrix [N, K] and round it to 8 bits, centred on zero, with one scale a row."""
    return _by_rows(_quantized_rotated, weight)


def _quantized(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    blocks = weight.float().reshape(len(weight), -1, BLOCK)
    if bits == 8:
        scales = (blocks.abs().amax(dim=-1) / 127).half()
        codes = blocks / _steps(scales) + _SIGNED_ZERO
        minima, zero = None, _SIGNED_ZERO
    else:
        low, high = blocks.aminmax(dim=-1)
        scales = ((high - low) / _LARGEST_CODE[bits]).half()
        minima, zero = low.half(), 0
        codes = (blocks - minima.float()[..., None]) / _steps(scales)
    codes = codes.round().clamp(0, _LARGEST_CODE[bits]).to(torch.uint8)
    return QuantizedWeight(codes.flatten(1), scales, minima, bits, zero=zero)


def _quantized_rotated(weight: torch.Tensor) -> QuantizedWeight:
    rotated = rotate(weight)
    scales = (rotated.abs().amax(dim=1, keepdim=True) / 127).half()
    codes = rotated / scales.float().clamp(min=_SMALLEST_HALF) + _SIGNED_ZERO
    codes = codes.round().clamp(1, _LARGEST_CODE[8]).to(torch.uint8)
    return QuantizedWeight(codes, scales, None, 8, zero=_SIGNED_ZERO, is_rotated=True)


def _by_rows(
    quantize: Callable[[torch.Tensor], QuantizedWeight], weight: torch.Tensor
) -> QuantizedWeight:
    """Quantize a matrix [N, K] a few rows at a time, which do not depend on each other."""
    num_rows = len(weight)
    whole = quantize(weight[:1]).map(lambda part: part.new_empty(num_rows, part.shape[1]))
    for rows in few_rows(num_rows):
        few = quantize(weight[rows])
        for part, own in zip(whole.parts, few.parts, strict=True):
            part[rows] = own
    return whole


def few_rows(num_rows: int) -> Iterator[slice]:
    """Yield parts of the rows, each small enough to widen beside a whole matrix."""
    for first in range(0, num_rows, _ROWS_A_TIME):
        yield slice(first, first + _ROWS_A_TIME)


def _steps(scales: torch.Tensor) -> torch.Tensor:
    return scales.float().clamp(min=_SMALLEST_HALF)[..., None]
