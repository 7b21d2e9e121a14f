"""The native kernels under AddressSanitizer and UBSan, on random shapes: `native/harness.cpp`."""

import os
import subprocess
from pathlib import Path

from legato.model.native_kernels import native_instructions

_ROOT = Path(__file__).parents[2]
_HARNESS = Path(__file__).parent / "native" / "harness.cpp"
_OWN_MODULE = ("bindings.cpp", "processor.cpp")
"""Which need Python's headers."""
_OPTIONS: dict[str, tuple[str, ...]] = {
    "avx2": ("-march=x86-64-v3",),
    "plain": ("-DLEGATO_PLAIN", "-march=x86-64-v3", "-Wno-psabi"),
    "avx512": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-DLEGATO_AVX512"),
}
_OPTIONS["amx"] = (
    *_OPTIONS["avx512"],
    *("-mamx-tile", "-mamx-bf16", "-mamx-int8", "-DLEGATO_AMX"),
)
_WITH_STATES = ("cache", "delta_net", "mamba2", "recurrence")
_RUN = "_ZN6legato10ThreadPool12run_reservedERKSt8functionIFvRKNS_6WorkerEEE"
"""The function in which nothing may be allocated: the harness has its own around it."""
_SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
_ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
CASES_A_RUN = 25


def sanitized_instructions() -> list[str]:
    """Return the sets of instructions that run here, the one with the widest vectors last.

    Plain kernels are for other processors, and run on this one, too.
    """
    return [name for name in _OPTIONS if name in ("plain", *native_instructions())]


def compile_harness(instructions: str, folder: Path, *, optimizes: bool = True) -> Path:
    """Compile the kernels and the harness; return the program.

    Args:
        optimizes: compiles the kernels in more than four times the time; cases run twice as fast.

    Raises:
        FileNotFoundError: there is no compiler.
        subprocess.CalledProcessError: it compiles no such program.
    """
    program = folder / f"harness-{instructions}"
    sources = [
        path for path in sorted((_ROOT / "native").glob("*.cpp")) if path.name not in _OWN_MODULE
    ]
    if not optimizes:
        sources = _units(sources, folder)
    objects = []
    for source in (*sources, _HARNESS):
        objects.append(folder / f"{source.stem}-{instructions}.o")
        level = 1 if optimizes or source == _HARNESS else 0
        _compile(
            "-std=c++20", f"-O{level}", "-g1", *_OPTIONS[instructions],
            f"-I{_ROOT / 'native'}", "-c", str(source), "-o", str(objects[-1]),
        )  # fmt: skip
    _compile(*map(str, objects), "-pthread", f"-Wl,--wrap={_RUN}", "-o", str(program))
    return program


def _units(sources: list[Path], folder: Path) -> list[Path]:
    """Return sources that include several of the given: reading headers takes half of the time.

    `_RUN` stays alone: the linker wraps no call from the source that defines it.
    """
    units = [source for source in sources if source.stem == "thread_pool"]
    for name, has_states in (("states", True), ("others", False)):
        units.append(folder / f"{name}.cpp")
        units[-1].write_text(
            "".join(
                f'#include "{source}"\n'
                for source in sources
                if source not in units and (source.stem in _WITH_STATES) is has_states
            )
        )
    return units


def failure_of(program: Path, seed: int, tries: int) -> str:
    """Run cases [seed, seed + tries); return what is wrong, empty if nothing is."""
    found = subprocess.run(
        [program, str(seed), str(tries)],
        capture_output=True,
        text=True,
        env={**os.environ, **_ENVIRONMENT},
    )
    if found.returncode == 0:
        return ""
    last = found.stdout.strip().rpartition("\n")[2]
    wrong = "\n".join(line for line in found.stdout.splitlines() if "WRONG" in line)
    return f"{wrong or last}\n{found.stderr[:4000]}"


def _compile(*arguments: str) -> None:
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, *_SANITIZERS, *arguments], check=True, capture_output=True)
