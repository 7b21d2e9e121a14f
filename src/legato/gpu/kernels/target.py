"""What kernels are compiled for."""

from triton import knobs
from triton.runtime import driver

_HOPPER = 90


def multiplies_from_shared_memory() -> bool:
    """Whether matrix products take operands from shared memory, not registers, as Hopper's do."""
    return _target() == ("cuda", _HOPPER)


def has_little_shared_memory() -> bool:
    """Whether a program may have no more than 64 KiB, as on AMD's GPUs before CDNA 4."""
    return _target()[0] == "hip"


def _target() -> tuple[str, int | str]:
    """Backend and architecture; of the interpreter's, none."""
    if knobs.runtime.interpret:
        return "", 0
    target = driver.active.get_current_target()
    return target.backend, target.arch
