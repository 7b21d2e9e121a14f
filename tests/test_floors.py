"""Rooms stand on their floors, and some of them stay free of torch; see the import contracts."""

import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from tests import house

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "module",
    [
        "legato.core.config",
        "legato.kv.manager",
        "legato.scheduler.scheduler",
        "legato_fleet.routing.router",
        "legato.executor.simulated",
        "legato.engine.loop.engine_loop",
    ],
)
def test_imports_no_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rooms_and_their_documentation_name_the_floors_of_the_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (
        contract["layers"]
        for contract in settings["contracts"]
        if contract["name"].startswith("Floors: ")
    )
    floors = {
        room.strip(): floor
        for floor, layer in enumerate(reversed(layers))
        for room in layer.split("|")
    }
    assert len(floors) > 5
    for room, floor in floors.items():
        assert (import_module(room).__doc__ or "").startswith(f"Floor {floor}: "), room
    rows = re.findall(
        r"^\| (\d+) \| (`.*?) \|",
        (ROOT / "docs/contributing/architecture.md").read_text(),
        re.MULTILINE,
    )
    told = {
        room if room in house.DISTRIBUTIONS else f"legato.{room}": int(floor)
        for floor, rooms in rows
        for room in re.findall(r"`(\w+)/`", rooms)
    }
    assert told == floors


def test_serving_needs_neither_the_fleet_nor_the_lab() -> None:
    """All of `legato` can be imported without them; libraries of extras may be missing."""
    code = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(('legato_fleet', 'legato_lab'))\n"
        "from importlib import import_module\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        import_module(name)\n"
        "    except ImportError as error:\n"
        "        assert not (error.name or '').startswith('legato'), (name, error)\n"
    )
    names = [name for name in house.modules() if house.package(name) == "legato"]
    assert len(names) > 300
    subprocess.run([sys.executable, "-c", code, *names], check=True)
