"""One exception for a step that wants more memory than there is."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_CPU_ALLOCATOR = "DefaultCPUAllocator: "
"""In the message of the plain RuntimeError that PyTorch's CPU allocator raises."""


@contextmanager
def raising_memory_error() -> Iterator[None]:
    """Turn what PyTorch raises when memory runs out, on any device, into `MemoryError`.

    NumPy and native kernels raise that by themselves.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error
    except RuntimeError as error:
        if _CPU_ALLOCATOR not in str(error):
            raise
        raise MemoryError(str(error)) from error
