"""Compiles kernels for GPUs that are not there.

    python -m tests.gpu.compile_kernels OUT.json [--once] [--for 89,100,120] [LAUNCH ...]

A launch is compiled for the GPUs that it is listed for in `launches.py`, or for those given. With
`--once`, it is compiled for the first of them alone: most often that with less shared memory.

Launchers run as they do on a GPU, on tensors of the meta device and shapes of real models; all
that is left out is the launch. So each kernel is compiled with the very constants, alignments and
options that a GPU would see. Triton brings the assembler. It must not interpret, so this is a
process of its own.
"""

import argparse
import json
import re
import subprocess
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
from tests.gpu.limits import MOST_SHARED_BYTES, Architecture

_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)")
_INEXACT = re.compile(r"\b(div\.(approx|full)|fma\.rn)\.f32")
"""Divisions with an error of two units in the last place, and products that are not rounded."""


class _NoGPU:
    """Stands for the driver of a GPU, as far as compiling asks it."""

    def __init__(self) -> None:
        self.architecture: Architecture = 90
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": MOST_SHARED_BYTES[self.architecture]}
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> Architecture:
        # Kernels are kept by device.
        return self.architecture

    def get_current_stream(self, _: Architecture) -> int:
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


def _registers(assembled: dict[str, Any]) -> tuple[int, int]:
    """That a thread has, and the bytes that it keeps in memory for want of more."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(assembled["cubin"])
        file.flush()
        told = subprocess.check_output([_CUOBJDUMP, "--dump-resource-usage", file.name], text=True)
    usage = _USAGE.search(told)
    assert usage is not None, told
    return int(usage[1]), int(usage[2]) + int(usage[3])


def _report(name: str, architecture: Architecture, kernel: Any) -> dict[str, Any]:
    registers, spilled = _registers(kernel.asm)
    return {
        "launch": name,
        "kernel": kernel.metadata.name,
        "architecture": architecture,
        "warps": kernel.metadata.num_warps,
        "registers": registers,
        "shared_bytes": kernel.metadata.shared,
        "spilled": spilled,
        "has_wgmma": "wgmma" in kernel.asm["ptx"],
        "rounds_exactly": not _INEXACT.search(kernel.asm["ptx"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--for", dest="architectures", default="")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    absent = _NoGPU()
    driver.set_active(absent)
    reports: list[dict[str, Any]] = []
    for name, launch in LAUNCHES.items():
        if args.names and name not in args.names:
            continue
        asked = tuple(map(int, args.architectures.split(","))) if args.architectures else ()
        architectures = asked or launch.architectures
        for absent.architecture in architectures[: 1 if args.once else None]:
            with torch.device("meta"):
                kernels = _compile(launch.run)
            assert kernels, f"{name} launches nothing"
            reports += [_report(name, absent.architecture, kernel) for kernel in kernels]
            args.out.write_text(json.dumps(reports, indent=1))


if __name__ == "__main__":
    main()
