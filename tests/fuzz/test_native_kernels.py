"""A small part of what `python -m tests.fuzz --only native` does for long."""

import os
import shutil
from pathlib import Path

import pytest

from tests.fuzz.native_kernels import compile_harness, failure_of, sanitized_instructions
from tests.profiles import scaled

_NUM_CASES = scaled(50)
_IS_THOROUGH = scaled(1) > 1
_SETS = sanitized_instructions()

pytestmark = [
    pytest.mark.endurance,
    pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler"),
]


@pytest.mark.parametrize("instructions", _SETS if _IS_THOROUGH else _SETS[:1])
def test_kernels_read_and_write_only_their_own(instructions: str, tmp_path: Path) -> None:
    """AVX2 in the default profile: compiling takes most of the time."""
    program = compile_harness(instructions, tmp_path, optimizes=_IS_THOROUGH)
    assert not failure_of(program, 0, _NUM_CASES)
