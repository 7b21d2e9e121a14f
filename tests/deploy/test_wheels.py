"""What is installed where nothing can be compiled."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from configparser import ConfigParser
from email import message_from_bytes
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from legato.cli.main import _COMMANDS
from legato.core.version import __version__

ROOT = Path(__file__).parents[2]
BUILD = "import sys, scikit_build_core.build as build; build.build_wheel(sys.argv[1])"
PACKAGES = ("fleet", "lab")


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
    assert "legato/py.typed" in names
    assert "legato/api/operations/chat/static/chat.js" in names
    assert "legato/api/operations/reference/static/reference.js" in names
    assert not [name for name in names if name.endswith(".so") or "legato_fleet" in name]


def test_wheels_are_built_for_all_versions_that_may_install_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["requires-python"] == ">=3.11"
    stable = project["tool"]["scikit-build"]["wheel"]["py-api"]
    built = {name.partition("-")[0] for name in project["tool"]["cibuildwheel"]["build"]}
    assert built == {"cp311", stable} == {"cp311", "cp312"}


def project_of(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())
    return settings["project"]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_of_a_package_beside_legato(package: str, tmp_path: Path) -> None:
    """All its files, for any platform, without a compiler or cmake."""
    pytest.importorskip("scikit_build_core")
    folder = ROOT / "packages" / package
    subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path)],
        cwd=folder,
        env={**os.environ, "PATH": ""},
        capture_output=True,
        check=True,
    )
    [path] = tmp_path.glob("*.whl")
    assert path.name == f"legato_{package}-{__version__}-py3-none-any.whl"
    wheel = zipfile.ZipFile(path)
    source = folder / "src"
    files = {
        file.relative_to(source).as_posix()
        for file in source.rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }
    info = f"legato_{package}-{__version__}.dist-info"
    assert {name for name in wheel.namelist() if not name.startswith(info)} == files
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    # A source distribution would keep the link, which leads out of it.
    assert not (folder / "LICENSE").is_symlink()
    metadata = message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert f"legato-llm=={__version__}" in metadata.get_all("Requires-Dist", [])
    entries = ConfigParser()
    entries.read_string(wheel.read(f"{info}/entry_points.txt").decode())
    assert dict(entries["legato.commands"]) == project_of(folder)["entry-points"]["legato.commands"]


def test_the_packages_have_one_version() -> None:
    """And name each other by it."""
    for package in PACKAGES:
        project = project_of(ROOT / "packages" / package)
        assert project["version"] == __version__
        pins = {pin for pin in project["dependencies"] if pin.startswith("legato")}
        names = {pin.partition("=")[0] for pin in pins}
        assert pins == {f"{name}=={__version__}" for name in names}
        assert "legato-llm" in names


def test_a_tag_is_of_the_version_that_wheels_have() -> None:
    """Where this commit is tagged; clones without tags and archives have a version, too."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return
    command = ["git", "tag", "--points-at", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    released = [tag for tag in done.stdout.split() if re.match(r"v\d", tag)]
    assert set(released) <= {f"v{__version__}"}
    if released:
        assert re.search(
            rf"^## {re.escape(__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M
        )


@pytest.mark.parametrize("name", ["installed", "installed-dev", "installed-fleet"])
def test_make_removes_the_distribution_of_the_former_name(name: str) -> None:
    """Removed after the new one is installed, it would take `bin/legato` along."""
    if shutil.which("make") is None:
        pytest.skip("no make on this machine")
    command = ["make", "--dry-run", "--always-make", f".venv/.{name}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    [removes] = [i for i, line in enumerate(lines) if re.search(" uninstall .*--yes legato$", line)]
    [installs] = [i for i, line in enumerate(lines) if " --editable ." in line.replace("'", "")]
    assert removes < installs


def test_every_command_of_another_package_has_an_entry_point() -> None:
    """Its extra of `legato-llm` brings the package that has it."""
    extras = project_of(ROOT)["optional-dependencies"]
    found = {}
    for package in PACKAGES:
        for command, module in project_of(ROOT / "packages" / package)["entry-points"][
            "legato.commands"
        ].items():
            assert callable(import_module(module).add_parser)
            found[command] = f"legato-{package}"
    told = {
        command: extras[plugin.extra][0].partition("[")[0]
        for command, plugin in _COMMANDS.items()
        if plugin is not None
    }
    assert found == told


def test_the_documented_path_of_a_fleets_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """`legato.fleet:app` is where files of deployments name it."""
    fleet = import_module("legato.fleet")
    if find_spec("ray") is not None:
        assert fleet.app is import_module("legato_fleet.front_door").app
    monkeypatch.setitem(sys.modules, "legato_fleet", None)
    monkeypatch.setitem(sys.modules, "legato_fleet.front_door", None)
    with pytest.raises(ImportError, match=r"pip install 'legato-llm\[fleet\]'"):
        _ = fleet.app
    assert not hasattr(fleet, "anything_else")
