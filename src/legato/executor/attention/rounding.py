"""Keys and values in 8 bits: multiples of a scale, one scale for each token and head.

A few channels of keys may be many times larger than the others, as the biases of some models make
them, and one scale for all would leave the others a few codes. So heads are mixed before they are
rounded: an orthogonal matrix spreads each channel over the whole head (Ashkboos et al., 2024,
arXiv:2404.00456, QuaRot). Scores stay as they were if queries are mixed, too, and attention's
result is that of mixed values.
"""

from functools import cache

import torch

from legato.model.rotation import hadamard

_MOST_CODE = 127.0
_AS_GOOD_AS_ZERO = 1e-30


def mix(rows: torch.Tensor) -> torch.Tensor:
    """Mix the numbers of heads [..., D] of any floating type. Mixing twice changes nothing."""
    return (rows.float() @ _mixer(rows.shape[-1], rows.device)).to(rows.dtype)


@cache
def _mixer(head_dim: int, device: torch.device) -> torch.Tensor:
    """Return the matrix [D, D] that `mix` and the kernels multiply with.

    A head is two halves of an odd number of pieces, whose size is a power of two. A Hadamard matrix
    mixes the numbers that have one place among the pieces, of both halves. The pieces are reflected
    at the plane on which their sum is zero.
    """
    size = head_dim & -head_dim
    num_halves, num_pieces = min(2, size), head_dim // size
    reflection = torch.eye(num_pieces) - (2 / num_pieces if num_pieces > 1 else 0.0)
    halves = torch.kron(hadamard(num_halves), reflection)
    return torch.kron(halves, hadamard(size // num_halves)).to(device)


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows to 8 bits, to the same numbers as native/codes.hpp.

    Args:
        rows: mixed, [..., D] of any floating type.

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
