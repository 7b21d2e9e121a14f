"""Views of the cache for kernels."""

import torch

from legato.model.model import SCALE_BYTES


def head_dim_of(cache: torch.Tensor) -> int:
    """Return D of one layer's cache, [num_blocks, K, block size, numbers of a token and head]."""
    return cache.shape[3] - (SCALE_BYTES if cache.dtype == torch.int8 else 0)


def scales_of(cache: torch.Tensor) -> torch.Tensor:
    """View the memory of a quantized cache as float32."""
    return cache.flatten(2).view(torch.float32)
