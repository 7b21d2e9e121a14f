"""Memory that the KV cache has not touched yet, taken while there is nothing to do. Torch-free."""

import ctypes
import mmap
import sys
from typing import TYPE_CHECKING

import psutil

from legato.core.memory import cgroup_room_bytes

if TYPE_CHECKING:
    import torch

_MADV_POPULATE_WRITE = 23
"""Linux's, since 5.14: touch pages without changing what is in them."""
_SLICE_BYTES = 2**18
"""Taken at a time, while which a request waits: well below a millisecond."""
_SLICES_A_LOOK = 256
"""Between looks at what memory there is."""


class UntakenPages:
    """The pages of a tensor, from its start on.

    A page that is touched for the first time in the midst of a step takes it a microsecond or more,
    and ten in a virtual machine whose host has no memory there either. Never is more than half of
    the memory taken that nobody uses; the rest then comes as it is used.

    Args:
        values: contiguous, on the CPU.
    """

    def __init__(self, values: "torch.Tensor") -> None:
        self._values = values  # whose memory must stay
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
        """Take a little; nothing more is asked for where the machine is short, or cannot."""
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
    """What this process could still take without taking it from others."""
    available, room = int(psutil.virtual_memory().available), cgroup_room_bytes()
    return available if room is None else min(available, room)
