"""What is installed where nothing can be compiled."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import sys, scikit_build_core.build as build; build.build_wheel(sys.argv[1])"


def test_a_wheel_without_a_compiler(tmp_path: Path) -> None:
    """All of Legato but the kernels, for any platform."""
    pytest.importorskip("scikit_build_core")
    if shutil.which("cmake") is None:
        pytest.skip("no cmake on this machine")
    subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "CC": "/bin/false", "CXX": "/bin/false"},
        capture_output=True,
        check=True,
    )
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "legato/cli/main.py" in names
    assert "legato/api/operations/reference/static/reference.js" in names
    assert not [name for name in names if name.endswith(".so")]


def test_wheels_are_built_for_all_versions_that_may_install_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["requires-python"] == ">=3.11"
    stable = project["tool"]["scikit-build"]["wheel"]["py-api"]
    built = {name.partition("-")[0] for name in project["tool"]["cibuildwheel"]["build"]}
    assert built == {"cp311", stable} == {"cp311", "cp312"}
