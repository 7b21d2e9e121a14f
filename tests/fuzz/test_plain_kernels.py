"""The plain kernels: as exact as those of AVX2, and they compile for aarch64."""

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from legato.engine.build import blueprint
from legato.model.native_kernels import native_instructions

NATIVE = Path(__file__).parents[2] / "native"
COMPILER = os.environ.get("CXX", "g++")


@pytest.mark.skipif(not shutil.which(COMPILER), reason="no C++ compiler")
@pytest.mark.skipif("avx2" not in native_instructions(), reason="no AVX2 to compare with")
def test_plain_vectors_compute_the_same_bits(tmp_path: Path) -> None:
    program = tmp_path / "plain_vectors"
    flags = ("-std=c++20", "-O1", "-march=x86-64-v3", "-Wno-psabi", "-Wno-ignored-attributes")
    source = Path(__file__).parent / "native" / "plain_vectors.cpp"
    command = [COMPILER, *flags, f"-I{NATIVE}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (done.returncode, sorted(set(done.stdout.splitlines()))) == (0, [])


@pytest.mark.skipif(not find_spec("ziglang"), reason="no cross compiler: pip install ziglang")
@pytest.mark.parametrize("source", sorted(NATIVE.glob("*.cpp")), ids=lambda path: path.name)
def test_plain_kernels_compile_for_aarch64(source: Path, tmp_path: Path) -> None:
    headers = [sysconfig.get_paths()["include"]]
    if source.name in ("bindings.cpp", "processor.cpp"):
        headers.append(pytest.importorskip("nanobind").include_dir())
    command = [
        *(sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu", "-std=c++20"),
        *("-O1", "-DLEGATO_PLAIN", "-DLEGATO_MODULE=_kernels_plain", *(f"-I{h}" for h in headers)),
        *("-c", str(source), "-o", str(tmp_path / "kernels.o")),
    ]
    subprocess.run(command, check=True)


def test_they_run_on_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blueprint, "native_instructions", lambda: ["plain"])
    cpu = torch.device("cpu")
    assert blueprint._native_candidates("auto", cpu) == []
    assert blueprint._native_candidates("plain", cpu) == ["plain"]
