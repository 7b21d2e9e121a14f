"""Every kernel is compiled for GPUs that are not there, and fits onto them."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.limits import MOST_SHARED_BYTES


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """See `compile_kernels`; in a process of its own, which does not interpret."""
    out = tmp_path_factory.mktemp("kernels") / "kernels.json"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.gpu.compile_kernels", str(out)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], env=env)
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def test_kernels_spill_no_registers(kernels: list[dict[str, Any]]) -> None:
    assert [kernel for kernel in kernels if kernel["spilled"]] == []


def test_kernels_fit_into_shared_memory(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels:
        assert kernel["shared_bytes"] <= MOST_SHARED_BYTES[kernel["architecture"]], kernel


def test_chunks_are_multiplied_by_hoppers_tensor_cores(kernels: list[dict[str, Any]]) -> None:
    uses = Counter(
        kernel["has_wgmma"]
        for kernel in kernels
        if kernel["architecture"] == 90 and kernel["kernel"] == "_attend_items"
    )
    # One in two: the narrow items' products are too small for them.
    assert uses[True] == uses[False] > 0
