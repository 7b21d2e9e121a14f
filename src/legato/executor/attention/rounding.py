"""Keys and values in 8 bits: multiples of a scale, one scale for each token and head."""

import torch

_MOST_CODE = 127.0
_AS_GOOD_AS_ZERO = 1e-30


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows to 8 bits, to the same numbers as native/codes.hpp.

    Args:
        rows: [..., D] of any floating type.

    Returns:
        codes [..., D] int8 from -127 to 127, scales [...] float32. A row that is not finite has the
        scale NaN, so that all results computed from it are NaN.
    """
    values = rows.float()
    most = values.abs().amax(-1)
    by = torch.where(most > _AS_GOOD_AS_ZERO, _MOST_CODE / most, 0.0)
    codes = (values * by.unsqueeze(-1)).nan_to_num(nan=0.0).round().to(torch.int8)
    return codes, most / _MOST_CODE + (values * 0.0).sum(-1)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows that `quantize` rounded, in `dtype`, each value within half a scale."""
    return (codes * scales.unsqueeze(-1)).to(dtype)
