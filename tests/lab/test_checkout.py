"""A comparison with another checkout runs that checkout's code."""

import subprocess
import sys
from pathlib import Path

from benchmarks.runner.checkout import environment


def test_programs_import_the_checkout_though_the_package_is_installed(tmp_path: Path) -> None:
    there = tmp_path / "there"
    packages = [there / "src" / "legato", there / "packages" / "lab" / "src" / "legato_lab"]
    for package in packages:
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
    child = (
        "import legato, legato_lab, subprocess, sys; "
        "print(legato.__file__, legato_lab.__file__, flush=True)"
    )
    code = f"{child}; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(there, tmp_path / "out"),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert ran.stdout.split() == [str(package / "__init__.py") for package in packages] * 2
