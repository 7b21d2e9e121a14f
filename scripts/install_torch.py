"""Install torch into the running Python: the CPU build where there is no NVIDIA GPU to use.

On many machines the newest torch on the package index brings gigabytes of CUDA libraries, which a
machine without a GPU has no use for. So this looks at what pip would install before it does.
"""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def main() -> int:
    requirement = torch_requirement()
    print(f"Looking for {requirement}", flush=True)
    would_install = plan(requirement)
    if not would_install:
        return 0
    brings_cuda = any(name.startswith(("nvidia-", "cuda-")) for name in would_install)
    if brings_cuda and not shutil.which("nvidia-smi") and install_cpu_build(requirement):
        return 0
    return pip("install", requirement)


def torch_requirement() -> str:
    dependencies = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    return next(d for d in dependencies if d.startswith("torch"))


def plan(requirement: str) -> list[str]:
    """Names of the packages that pip would install; empty where torch is there already."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--report", "-"]
    report = subprocess.run([*command, requirement], check=True, stdout=subprocess.PIPE).stdout
    return [item["metadata"]["name"].lower() for item in json.loads(report)["install"]]


def install_cpu_build(requirement: str) -> bool:
    """uv knows where PyTorch publishes its CPU builds; False where that cannot be reached."""
    print("No NVIDIA GPU here: installing the CPU build of torch")
    pip("install", "--quiet", "uv")
    command = ["uv", "pip", "install", "--python", sys.executable, "--torch-backend", "cpu"]
    return subprocess.call([sys.executable, "-m", *command, requirement]) == 0


def pip(*arguments: str) -> int:
    return subprocess.call([sys.executable, "-m", "pip", *arguments])


if __name__ == "__main__":
    sys.exit(main())
