"""The memory that this process may take, and errors from a lack of it."""

import errno
import os
import resource

import psutil

from legato.core.control_groups import cgroup_limit_bytes, cgroup_room_bytes
from legato.core.errors import ConfigError

_LIBRARY_BYTES = 2**30
_CORE_BYTES = 40 * 2**20
"""Address space that the libraries alone map, almost, and that NumPy's OpenBLAS maps for each core,
up to 64 cores. With less, some libraries end the process themselves."""
_ALLOCATOR = "DefaultCPUAllocator: "
"""Part of the message of the plain RuntimeError that PyTorch's CPU allocator raises."""
_SIGNS = (
    _ALLOCATOR,
    "std::bad_alloc",
    "failed to map segment from shared object",
    "Cannot allocate memory",
    "can't start new thread",
    "Resource temporarily unavailable",  # from C++, when it cannot start a thread
    "out of memory",  # a GPU's, from PyTorch, the driver, or Triton
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def address_space_bytes() -> int | None:
    """Return the most address space that this process may map; None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def memory_bytes() -> int:
    """Return the most memory that this process can ever have."""
    limits = (int(psutil.virtual_memory().total), cgroup_limit_bytes(), address_space_bytes())
    return min(limit for limit in limits if limit is not None)


def free_memory_bytes() -> int:
    """Return the host memory that is free and that this process may still take.

    All sizes that are made from the machine's memory are made from this one.
    """
    rooms = [int(psutil.virtual_memory().available), cgroup_room_bytes()]
    limit = address_space_bytes()
    if limit is not None:
        rooms.append(limit - int(psutil.Process().memory_info().vms))
    return max(0, min(room for room in rooms if room is not None))


def check_size(flag: str, num_bytes: int, most_bytes: int, owner: str = "this process") -> None:
    """Refuse a size of memory that can never be had, rather than cut it.

    Args:
        owner: of `most_bytes`, for the message.

    Raises:
        ConfigError: the size is larger.
    """
    if num_bytes > most_bytes:
        is_limited = most_bytes == address_space_bytes()
        raise ConfigError(
            f"{flag} is {gibibytes(num_bytes)}, but {owner} can have at most "
            f"{gibibytes(most_bytes)} of memory"
            + (f" by its ulimit -v, {_mebibytes(most_bytes)}" if is_limited else "")
        )


def gibibytes(num_bytes: int) -> str:
    """Return a size in words."""
    return f"{num_bytes / 2**30:,.2f} GiB"


def check_address_space() -> None:
    """Refuse a limit on the address space that is too low for any model.

    Below it, a library may end the process.

    Raises:
        ConfigError: the limit is too low.
    """
    limit = address_space_bytes()
    least = _LIBRARY_BYTES + min(64, os.cpu_count() or 1) * _CORE_BYTES
    if limit is not None and limit < least:
        raise ConfigError(
            f"there is not enough memory: the address space is limited to {_mebibytes(limit)} "
            f"(ulimit -v), and the libraries alone take {_mebibytes(least)}"
        )


def is_shortage(error: BaseException) -> bool:
    """Whether memory of any kind ran out, in any library."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, ImportError | RuntimeError) and any(
        sign in str(error) for sign in _SIGNS
    )


def describe_shortage(error: BaseException) -> str:
    """Describe the shortage and what to do about it, on one line."""
    lines = [line for line in str(error).splitlines() if any(sign in line for sign in _SIGNS)]
    reason = (lines or [str(error) or type(error).__name__])[0].rpartition(_ALLOCATOR)[2]
    return f"there is not enough memory ({reason}): {advice()}"


def advice() -> str:
    """Return what a user can do about a shortage."""
    limit = address_space_bytes()
    limited = (
        ""
        if limit is None
        else f"raise the limit on the address space (ulimit -v, {_mebibytes(limit)}), or "
    )
    return f"{limited}take a smaller model, or a lower --kv-cache-memory or --max-model-len"


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
