"""Every kernel is compiled for GPUs that are not there, and fits onto them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from legato.gpu import work_items
from tests.gpu.limits import MOST_SHARED_BYTES, programs_at_once
from tests.profiles import scaled


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """See `compile_kernels`; in a process of its own, which does not interpret.

    The thorough profile compiles each launch for each GPU that it is for.
    """
    out = tmp_path_factory.mktemp("kernels") / "kernels.json"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.gpu.compile_kernels", str(out)]
    if scaled(1) == 1:
        command.append("--once")
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], env=env)
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def test_kernels_spill_no_registers(kernels: list[dict[str, Any]]) -> None:
    """Two, at most. Only where chunks load tiles of keys, more of them were measured to pay."""
    spilling = {kernel["launch"] for kernel in kernels if kernel["spilled"] > 8}
    assert spilling <= {_WITH_TILES}
    assert [kernel for kernel in kernels if kernel["spilled"] > _MOST_SPILLED] == []


def test_kernels_fit_into_shared_memory(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels:
        assert kernel["shared_bytes"] <= MOST_SHARED_BYTES[kernel["architecture"]], kernel


def test_chunks_are_multiplied_by_hoppers_tensor_cores(kernels: list[dict[str, Any]]) -> None:
    uses = {
        (kernel["warps"], kernel["has_wgmma"])
        for kernel in kernels
        if kernel["architecture"] == 90 and kernel["kernel"] == "_attend_items"
    }
    # The narrow items' products, of four warps, are too small for them.
    assert uses == {(4, False), (8, True), (4, True)}


def test_as_many_programs_fit_as_work_items_are_made_for(kernels: list[dict[str, Any]]) -> None:
    """Of models whose heads are of usual sizes, in their own dtype or in 8 bits."""
    for kernel in kernels:
        if kernel["kernel"] != "_attend_items" or kernel["launch"] in _LARGE:
            continue
        is_wide = kernel["warps"] == 8 or kernel["has_wgmma"]
        assumed = work_items._WIDE_AT_ONCE if is_wide else work_items._NARROW_AT_ONCE
        fields = ("warps", "registers", "shared_bytes")
        fit = programs_at_once(kernel["architecture"], **{name: kernel[name] for name in fields})
        assert fit >= assumed, kernel


_WITH_TILES = "attend, Llama 3.1 8B"
_MOST_SPILLED = 208
_LARGE = ("attend, heads of 256", "attend, heads of 512", "attend, float32")


@pytest.mark.parametrize("name", ["rotate, an 8-bit cache", "round to 8-bit floats"])
def test_numbers_are_rounded_to_8_bits_as_on_a_cpu(
    name: str, kernels: list[dict[str, Any]]
) -> None:
    """No division is approximate, and no product goes into a sum before it is rounded.

    SiLU, which the second kernel of the name has, is no such rounding.
    """
    kernel = next(kernel for kernel in kernels if kernel["launch"] == name)
    assert kernel["rounds_exactly"]
