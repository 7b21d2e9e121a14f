"""Refusing weights that are no numbers, before anything is computed with them."""

import torch

from legato.core.errors import UnsupportedModelError
from legato.model.quantization import BLOCK, QuantizedWeight

_LARGEST_DEQUANTIZED = 256 * torch.finfo(torch.float16).max


def check_finite(name: str, weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype) -> None:
    """One pass over a weight, at the speed of memory; over the scales of a quantized one.

    Args:
        name: for messages.
        dtype: that the weight, or what it stands for where it is only stored quantized, is to be
            converted to.

    Raises:
        UnsupportedModelError: a value is NaN, infinite, or too large for `dtype`.
    """
    if isinstance(weight, QuantizedWeight):
        if weight.is_stored_only and torch.finfo(dtype).max < _LARGEST_DEQUANTIZED:
            check_finite(name, weight.dequantize(), dtype)
            return
        for part in (weight.scales, weight.minima):
            if (place := _first_bad(part, part.dtype)) is not None:
                row, block = place
                raise UnsupportedModelError(
                    f"{name} has a scale of {part[row, block].item()} for the {BLOCK} values from "
                    f"{[row, block * BLOCK]} on: the checkpoint is damaged, or has values that are "
                    "too large to be quantized"
                )
    elif (place := _first_bad(weight, dtype)) is not None:
        value = weight[tuple(place)]
        limit = str(dtype).removeprefix("torch.")
        reason = f"too large for {limit}" if value.isfinite() else "the checkpoint is damaged"
        raise UnsupportedModelError(f"{name} has {value.item():g} at {place}: {reason}")


def _first_bad(values: torch.Tensor, dtype: torch.dtype) -> list[int] | None:
    """Index of the first value that is not finite in a dtype; None where all are."""
    largest = torch.finfo(dtype).max
    low, high = values.aminmax()
    if -largest <= low.item() and high.item() <= largest:  # both are NaN where any value is
        return None
    is_bad = ~(values.abs() <= largest)
    return [int(index) for index in is_bad.nonzero()[0]]
