"""Properties of the GPU for which kernels are compiled."""

from triton import knobs
from triton.runtime import driver

_HOPPER = 90


def multiplies_from_shared_memory() -> bool:
    """Whether matrix products read operands from shared memory, as on Hopper, not registers."""
    return _target() == ("cuda", _HOPPER)


def _target() -> tuple[str, int | str]:
    """Return backend and architecture; empty for Triton's interpreter."""
    if knobs.runtime.interpret:
        return "", 0
    target = driver.active.get_current_target()
    return target.backend, target.arch
