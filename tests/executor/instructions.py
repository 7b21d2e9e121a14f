"""The sets of instructions that tests of native kernels run on.

Where the processor lacks a set, its kernels run by emulation, so that no kernel is only compiled.
"""

from legato.model.native_kernels import emulated_instructions, native_instructions

SETS = ("avx2", "avx512", "amx")


def module_of(instructions: str) -> str | None:
    """The kernels for a set that run here, natively or by emulation; None without a compiler."""
    found = (instructions, f"emulated_{instructions}")
    return next((name for name in found if name in RUNNABLE), None)


def how_they_run() -> str:
    """Which sets run natively, and which by emulation."""
    words = {None: "NOT AT ALL", **{f"emulated_{name}": "by emulation" for name in SETS}}
    return ", ".join(f"{name} {words.get(module_of(name), 'natively')}" for name in SETS)


RUNNABLE = (*native_instructions(), *emulated_instructions())
TESTED = [name for name in map(module_of, SETS) if name is not None]
"""One a set."""
