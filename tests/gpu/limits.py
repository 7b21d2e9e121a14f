"""What GPUs have."""

Architecture = int
"""NVIDIA's compute capability."""

MOST_SHARED_BYTES: dict[Architecture, int] = {
    80: 163 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
}
"""Value what a block of threads may have."""

_RESERVED_SHARED_BYTES = 1024
"""Of each block, for the system."""
_REGISTERS = 64 * 1024
_WARP_THREADS = 32
_GRANULE = 8
"""A thread's registers are a multiple of so many."""


def programs_at_once(
    architecture: Architecture, *, warps: int, registers: int, shared_bytes: int
) -> int:
    """Programs that fit on a processor.

    Args:
        registers: of a thread.
        shared_bytes: of a program.
    """
    of_program = warps * _WARP_THREADS * -(-registers // _GRANULE) * _GRANULE
    all_shared_bytes = MOST_SHARED_BYTES[architecture] + _RESERVED_SHARED_BYTES
    by_shared_bytes = all_shared_bytes // (shared_bytes + _RESERVED_SHARED_BYTES)
    return min(_REGISTERS // of_program, by_shared_bytes)
