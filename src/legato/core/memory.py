"""The limit on the address space (`ulimit -v`), and the errors that mean that memory ran out."""

import errno
import os
import resource

from legato.core.errors import ConfigError

_LIBRARY_BYTES = 2**30
_CORE_BYTES = 40 * 2**20
"""What the libraries alone map, or almost, and NumPy's OpenBLAS for each core, up to 64 of them.
With less, some end the process themselves."""
_ALLOCATOR = "DefaultCPUAllocator: "
"""In the message of the plain RuntimeError that PyTorch's CPU allocator raises."""
_SIGNS = (
    _ALLOCATOR,
    "std::bad_alloc",
    "failed to map segment from shared object",
    "Cannot allocate memory",
    "can't start new thread",
    "Resource temporarily unavailable",  # nor can C++
)


def address_space_bytes() -> int | None:
    """The most that this process may map, None where there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def check_address_space() -> None:
    """Refuse a limit under which no model can be loaded, before a library ends the process.

    Raises:
        ConfigError: there is such a limit.
    """
    limit = address_space_bytes()
    least = _LIBRARY_BYTES + min(64, os.cpu_count() or 1) * _CORE_BYTES
    if limit is not None and limit < least:
        raise ConfigError(
            f"there is not enough memory: the address space is limited to {_mebibytes(limit)} "
            f"(ulimit -v), and the libraries alone take {_mebibytes(least)}"
        )


def is_shortage(error: BaseException) -> bool:
    """Whether an error means that memory ran out, of any kind and in any library."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, ImportError | RuntimeError) and any(
        sign in str(error) for sign in _SIGNS
    )


def describe_shortage(error: BaseException) -> str:
    """What is missing and what to do about it, on one line."""
    lines = [line for line in str(error).splitlines() if any(sign in line for sign in _SIGNS)]
    reason = (lines or [str(error) or type(error).__name__])[0].rpartition(_ALLOCATOR)[2]
    return f"there is not enough memory ({reason}): {advice()}"


def advice() -> str:
    """What a user can do about a shortage."""
    limit = address_space_bytes()
    limited = (
        ""
        if limit is None
        else f"raise the limit on the address space (ulimit -v, {_mebibytes(limit)}), or "
    )
    return f"{limited}take a smaller model, or a lower --kv-cache-memory or --max-model-len"


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
