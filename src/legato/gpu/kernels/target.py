"""What kernels are compiled for."""

from triton import knobs
from triton.runtime import driver

_HOPPER = 90


def multiplies_from_shared_memory() -> bool:
    """Whether matrix products take operands from shared memory, not registers, as Hopper's do."""
    if knobs.runtime.interpret:
        return False
    target = driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch == _HOPPER)
