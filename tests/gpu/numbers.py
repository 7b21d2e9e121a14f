"""Number formats that kernels are tried in, and how near to float64 they have to come."""

import pytest
import torch

# Triton's interpreter multiplies bfloat16 wrongly and says nothing.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])

_TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Equal but for the rounding of numbers of about one to `dtype`, a few times over."""
    tolerance = _TOLERANCE[dtype]
    torch.testing.assert_close(
        actual.double().cpu(), expected.double().cpu(), rtol=tolerance, atol=tolerance
    )
