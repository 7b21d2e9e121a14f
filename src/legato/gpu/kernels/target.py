"""Properties of the GPU for which kernels are compiled."""

from triton import knobs
from triton.runtime import driver

_HOPPER = 90


def multiplies_from_shared_memory() -> bool:
    """Whether matrix products read operands from shared memory, as on Hopper, not registers."""
    return _target() == ("cuda", _HOPPER)


def has_little_shared_memory() -> bool:
    """Whether a program has at most 64 KiB of shared memory, as on AMD's GPUs before CDNA 4."""
    return _target()[0] == "hip"


def _target() -> tuple[str, int | str]:
    """Return backend and architecture; empty for Triton's interpreter."""
    if knobs.runtime.interpret:
        return "", 0
    target = driver.active.get_current_target()
    return target.backend, target.arch
