"""Keys and values in 8 bits: rounded to multiples of a scale of their own, one a token and head."""

import torch

_MOST_CODE = 127.0
_AS_GOOD_AS_ZERO = 1e-30


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same numbers as native/codes.hpp has.

    Args:
        rows: [..., D] of any floating type.

    Returns:
        codes [..., D] int8 from -127 to 127, scales [...] float32. The scale of a row that is not
        finite is NaN, so that all that comes of it is.
    """
    values = rows.float()
    most = values.abs().amax(-1)
    by = torch.where(most > _AS_GOOD_AS_ZERO, _MOST_CODE / most, 0.0)
    codes = (values * by.unsqueeze(-1)).nan_to_num(nan=0.0).round().to(torch.int8)
    return codes, most / _MOST_CODE + (values * 0.0).sum(-1)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `quantize` made of rows, in `dtype`: each within half a scale of what it was."""
    return (codes * scales.unsqueeze(-1)).to(dtype)
