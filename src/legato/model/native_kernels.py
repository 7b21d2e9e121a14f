"""The native kernels of one set of instructions of a CPU.

The arithmetic is in an extension module (source in native/), one for each set of instructions.
PyTorch computes everything if no extension was built, or none runs on this processor.
"""

import hashlib
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import torch

from legato.core.rows import CPU_ROWS, UNPADDED, RowCounts
from legato.model.native_weights import Weight

try:
    from legato import _processor
except ImportError:  # no compiler was available at installation
    _processor = None  # type: ignore[assignment]


def native_instructions() -> list[str]:
    """Return the instruction sets that have kernels and run here, fastest first."""
    return [name for name in _runnable() if find_spec(_module(name))]


def emulated_instructions() -> list[str]:
    """Return the built kernels of AVX-512 and AMX in plain C++, for tests only."""
    emulated = ("emulated_avx512", "emulated_amx") if "avx2" in _runnable() else ()
    return [name for name in emulated if find_spec(_module(name))]


def unbuilt_instructions() -> list[str]:
    """Return the instruction sets that would run here, but have no kernels from the compiler."""
    return [name for name in _runnable() if not find_spec(_module(name))]


def why_no_instructions() -> str:
    """Return why `native_instructions` has none; empty if it has some."""
    if _processor is None:
        return "no extension was built, for want of a C++ compiler"
    if not native_instructions():
        return "the processor has no AVX2, or the compiler knew of no such instructions"
    return ""


def kernels_digest(instructions: str) -> str:
    """Return a digest of the compiled kernels for these instructions; "none" if there are none."""
    found = find_spec(_module(instructions))
    if found is None or found.origin is None:
        return "none"
    return hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()[:16]


def _runnable() -> list[str]:
    return [] if _processor is None else _processor.instructions()


def _module(instructions: str) -> str:
    return f"legato._kernels_{instructions}"


class NativeKernels:
    """The kernels of one instruction set, and the threads that run them.

    Args:
        instructions: one of `native_instructions()`, or of `emulated_instructions()`.

    Attributes:
        rows: as of `Model`, where no weights are packed.
    """

    def __init__(self, num_threads: int, instructions: str) -> None:
        assert instructions in (*native_instructions(), *emulated_instructions()), instructions
        self.num_threads = num_threads
        self.instructions = instructions
        self.extension: Any = import_module(_module(instructions))
        self.pool = self.extension.ThreadPool(num_threads)
        self.operators = self.extension.Operators(self.pool)
        self.rows = CPU_ROWS if instructions.endswith("amx") else UNPADDED

    def most_packed(self, weight: Weight) -> int:
        """Return the `RowCounts.most_packed` of products with this weight."""
        if isinstance(weight, torch.Tensor) or weight.is_stored_only:
            return 0
        if weight.is_rotated or weight.is_float8:
            return 0
        return int(self.extension.most_packed(weight.bits, weight.rounds_rows))

    def rows_with(self, packed: Counter[int]) -> RowCounts:
        """Return a model's row counts; key `most_packed` of weights, value bytes of these."""
        most_packed = max(packed, key=packed.__getitem__, default=0)
        return msgspec.structs.replace(self.rows, most_packed=most_packed)
