"""Touches the KV cache's memory ahead of use, while the engine is idle. Torch-free."""

import ctypes
import mmap
import sys
from typing import TYPE_CHECKING

import psutil

from legato.core.memory import cgroup_room_bytes

if TYPE_CHECKING:
    import torch

_MADV_POPULATE_WRITE = 23
"""Linux's flag, since 5.14: touch pages without changing their contents."""
_SLICE_BYTES = 2**18
"""Taken in one call, during which a request waits: well below a millisecond."""
_SLICES_A_LOOK = 256
"""Slices between checks of free memory."""


class UntakenPages:
    """The pages of a tensor that are not yet touched, taken from its start on.

    A first touch in the middle of a step costs a microsecond or more, and ten in a virtual machine
    whose host has not allocated the page either. At most half of the machine's free memory is
    taken this way; other pages are allocated as they are used.

    Args:
        values: contiguous, on the CPU.
    """

    def __init__(self, values: "torch.Tensor") -> None:
        self._values = values  # keeps the memory alive
        page = mmap.PAGESIZE
        self._next = -(-values.data_ptr() // page) * page
        self._end = (values.data_ptr() + values.nbytes) // page * page
        self._num_slices = 0
        if sys.platform != "linux":
            self._end = self._next

    @property
    def has_more(self) -> bool:
        return self._next < self._end

    def take_slice(self) -> None:
        """Touch the next slice; give up if memory is short or the system cannot do it."""
        if self._num_slices % _SLICES_A_LOOK == 0 and _room_bytes() < 2 * (self._end - self._next):
            self._end = self._next
            return
        self._num_slices += 1
        num_bytes = min(_SLICE_BYTES, self._end - self._next)
        self._next = self._next + num_bytes if _populate(self._next, num_bytes) else self._end


def _populate(address: int, num_bytes: int) -> bool:
    libc = ctypes.CDLL(None)
    failed = libc.madvise(
        ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE
    )
    return not failed


def _room_bytes() -> int:
    """Return the memory that this process can take without taking it from other processes."""
    available, room = int(psutil.virtual_memory().available), cgroup_room_bytes()
    return available if room is None else min(available, room)
