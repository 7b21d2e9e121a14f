"""Rejects weights that are NaN, infinite or too large, before a step computes with them."""

import torch

from legato.core.errors import UnsupportedModelError
from legato.model.quantization import QuantizedWeight

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
            check_finite(name, weight.dequantize(), dtype)
            return
        if weight.is_float8 and (is_nan := (weight.codes & _FLOAT8_NAN) == _FLOAT8_NAN).any():
            raise UnsupportedModelError(
                f"{name} has nan at {is_nan.nonzero()[0].tolist()}: the checkpoint is damaged"
            )
        for part in (weight.scales, weight.minima):
            if part is None:
                continue
            if (place := _first_bad(part, _LARGEST_SCALE[part.dtype])) is not None:
                row, group = place
                raise UnsupportedModelError(
                    f"{name} has a scale of {part[row, group].item()} for the {weight.group} "
                    f"values from {[row, group * weight.group]} on: the checkpoint is damaged, or "
                    "has values that are too large to be quantized"
                )
    elif (place := _first_bad(weight, torch.finfo(dtype).max)) is not None:
        value = weight[tuple(place)]
        limit = str(dtype).removeprefix("torch.")
        reason = f"too large for {limit}" if value.isfinite() else "the checkpoint is damaged"
        raise UnsupportedModelError(f"{name} has {value.item():g} at {place}: {reason}")


def _first_bad(values: torch.Tensor, largest: float) -> list[int] | None:
    """Return the index of the first value that is NaN or larger; None if there is none."""
    low, high = values.aminmax()
    if -largest <= low.item() and high.item() <= largest:  # both are NaN if any value is
        return None
    is_bad = ~(values.abs() <= largest)
    return [int(index) for index in is_bad.nonzero()[0]]
