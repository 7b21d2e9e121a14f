"""The limit on the address space (`ulimit -v`), and errors from a lack of memory."""

import errno
import os
import resource
from pathlib import Path

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

_CGROUP_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_CGROUP_2 = ("memory.max", "memory.current")


def address_space_bytes() -> int | None:
    """Return the most address space that this process may map; None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def cgroup_room_bytes(root: Path = Path("/sys/fs/cgroup"), own: str | None = None) -> int | None:
    """Return the memory that this process's control groups still allow; None without a limit.

    Args:
        own: contents of /proc/self/cgroup, of either version.
    """
    try:
        lines = (Path("/proc/self/cgroup").read_text() if own is None else own).splitlines()
    except OSError:
        return None
    rooms: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, names = (root / "memory", _CGROUP_1) if controllers else (root, _CGROUP_2)
        folder = top / path.lstrip("/")
        groups = [group for group in (folder, *folder.parents) if group.is_relative_to(top)]
        rooms += [room for group in groups if (room := _room(group, *names)) is not None]
    return min(rooms, default=None)


def _room(group: Path, limit_name: str, usage_name: str) -> int | None:
    try:
        limit, usage = (group / limit_name).read_text(), (group / usage_name).read_text()
        return max(0, int(limit) - int(usage))
    except (OSError, ValueError):  # the group is not visible, or its limit is "max"
        return None


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
