"""Touches the KV cache's memory ahead of use, while the engine is idle. Torch-free."""

import ctypes
import mmap
import sys
from typing import TYPE_CHECKING

from legato.core.memory_limits import free_memory_bytes

if TYPE_CHECKING:
    import torch

_MADV_POPULATE_WRITE = 23
"""Linux's flag, since 5.14: touch pages without changing their contents."""
_SLICE_BYTES = 2**18
"""Taken in one call, during which a request waits: well below a millisecond."""
_SLICES_A_LOOK = 256
"""Slices between checks of free memory."""


class UntakenPages:
    """The pages of tensors that are not yet touched, taken from their starts on.

    A first touch in the middle of a step costs a microsecond or more, and ten in a virtual machine
    whose host has not allocated the page either. At most half of the machine's free memory is
    taken this way; other pages are allocated as they are used.

    Args:
        tensors: contiguous, on the CPU.
    """

    def __init__(self, *tensors: "torch.Tensor") -> None:
        self._tensors = tensors  # keeps the memory alive
        page = mmap.PAGESIZE
        spans = [
            range(
                -(-values.data_ptr() // page) * page,
                (values.data_ptr() + values.nbytes) // page * page,
            )
            for values in tensors
            if sys.platform == "linux"
        ]
        # Addresses of untouched pages, the next ones in the last span.
        self._spans = [span for span in reversed(spans) if span]
        self._num_slices = 0

    @property
    def has_more(self) -> bool:
        return bool(self._spans)

    def take_slice(self) -> None:
        """Touch the next slice; give up if memory is short or the system cannot do it."""
        num_left = sum(map(len, self._spans))
        if self._num_slices % _SLICES_A_LOOK == 0 and free_memory_bytes() < 2 * num_left:
            self._spans = []
            return
        self._num_slices += 1
        span = self._spans.pop()
        num_bytes = min(_SLICE_BYTES, len(span))
        if not _populate(span.start, num_bytes):
            self._spans = []
        elif num_bytes < len(span):
            self._spans.append(span[num_bytes:])


def _populate(address: int, num_bytes: int) -> bool:
    libc = ctypes.CDLL(None)
    failed = libc.madvise(
        ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE
    )
    return not failed
