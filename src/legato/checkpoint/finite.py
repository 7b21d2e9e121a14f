"""Rejects weights that are NaN, infinite or too large, before a step computes with them."""

from collections.abc import Iterable
from operator import itemgetter

import torch

from legato.core.errors import UnsupportedModelError
from legato.model.file_weight import FileWeight
from legato.model.quantization import QuantizedWeight, few_rows

_LARGEST_DEQUANTIZED = 256 * torch.finfo(torch.float16).max
_LARGEST_SCALE = {torch.float16: torch.finfo(torch.float16).max, torch.float32: 2.0**100}
_FLOAT8_NAN = 0x7F
"""With either sign."""


def check_finite(name: str, weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype) -> None:
    """Check a weight, or the scales of a quantized one, in one pass at the speed of memory.

    Args:
        name: for messages.
        dtype: the dtype that the weight will be converted to; of the dequantized weight, if it is
            only stored quantized.

    Raises:
        UnsupportedModelError: a value is NaN, infinite, or too large for `dtype`.
    """
    if isinstance(weight, QuantizedWeight):
        if weight.is_stored_only and torch.finfo(dtype).max < _LARGEST_DEQUANTIZED:
            for rows in few_rows(len(weight.codes)):
                few = weight.map(itemgetter(rows)).dequantize()
                _check_plain(name, few, dtype, first_row=rows.start)
            return
        if weight.is_float8 and (is_nan := (weight.codes & _FLOAT8_NAN) == _FLOAT8_NAN).any():
            raise UnsupportedModelError(
                f"{name} has nan at {is_nan.nonzero()[0].tolist()}: the checkpoint is damaged"
            )
        parts: Iterable[torch.Tensor | None] = (weight.scales, weight.minima)
        if isinstance(weight, FileWeight):
            parts = weight.halves()
        for part in parts:
            if part is None:
                continue
            if (place := _first_bad(part, _LARGEST_SCALE[part.dtype])) is not None:
                row, group = place
                size = weight.shape[1] // part.shape[1]
                raise UnsupportedModelError(
                    f"{name} has a scale of {part[row, group].item()} for the {size} "
                    f"values from {[row, group * size]} on: the checkpoint is damaged, or "
                    "has values that are too large to be quantized"
                )
    else:
        _check_plain(name, weight, dtype)


def _check_plain(name: str, weight: torch.Tensor, dtype: torch.dtype, first_row: int = 0) -> None:
    """Args: first_row: index of the weight's first row, for messages."""
    if (place := _first_bad(weight, torch.finfo(dtype).max)) is None:
        return
    value = weight[tuple(place)]
    limit = str(dtype).removeprefix("torch.")
    reason = f"too large for {limit}" if value.isfinite() else "the checkpoint is damaged"
    where = [place[0] + first_row, *place[1:]] if place else place
    raise UnsupportedModelError(f"{name} has {value.item():g} at {where}: {reason}")


def _first_bad(values: torch.Tensor, largest: float) -> list[int] | None:
    """Return the index of the first value that is NaN or larger; None if there is none."""
    low, high = values.aminmax()
    if -largest <= low.item() and high.item() <= largest:  # both are NaN if any value is
        return None
    is_bad = ~(values.abs() <= largest)
    return [int(index) for index in is_bad.nonzero()[0]]
