"""Compiles kernels for GPUs that are not there.

    python -m tests.gpu.compile_kernels OUT.json ["what of launches.py" ...]

Launchers run as they do on a GPU, on tensors of the meta device and shapes of real models; all
that is left out is the launch. So each kernel is compiled with the very constants, alignments and
options that a GPU would see. Triton brings the assembler. It must not interpret, so this is a
process of its own.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tests.gpu.launches import LAUNCHES
from tests.gpu.limits import MOST_SHARED_BYTES

_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)")


class _NoGPU:
    """Stands for the driver of a GPU of the given capability, as far as compiling asks it."""

    def __init__(self) -> None:
        self.capability = 90
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": MOST_SHARED_BYTES[self.capability]}
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, _: int) -> int:
        return 0


def _compile(launch: Callable[[], Any]) -> list[Any]:
    """What the kernels that `launch` would run were compiled to."""
    kernels: list[Any] = []

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        del warmup
        kernels.append(original(kernel, *args, grid=grid, warmup=True, **kwargs))

    original = JITFunction.run
    JITFunction.run = run
    try:
        launch()
    finally:
        JITFunction.run = original
    return kernels


def _report(name: str, capability: int, kernel: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.check_output([_CUOBJDUMP, "--dump-resource-usage", file.name], text=True)
    usage = _USAGE.search(told)
    assert usage is not None, told
    registers, stack_bytes, local_bytes = map(int, usage.groups())
    return {
        "launch": name,
        "kernel": kernel.metadata.name,
        "capability": capability,
        "warps": kernel.metadata.num_warps,
        "registers": registers,
        "shared_bytes": kernel.metadata.shared,
        "spilled_bytes": stack_bytes + local_bytes,
        "has_wgmma": "wgmma" in kernel.asm["ptx"],
    }


def main() -> None:
    out = Path(sys.argv[1])
    names = sys.argv[2:]
    absent = _NoGPU()
    driver.set_active(absent)
    reports: list[dict[str, Any]] = []
    for name, launch in LAUNCHES.items():
        if names and name not in names:
            continue
        for absent.capability in launch.capabilities:
            with torch.device("meta"):
                kernels = _compile(launch.run)
            assert kernels, f"{name} launches nothing"
            reports += [_report(name, absent.capability, kernel) for kernel in kernels]
    out.write_text(json.dumps(reports, indent=1))


if __name__ == "__main__":
    main()
