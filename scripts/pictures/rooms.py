"""The rooms of the code, one above the other, as the contract of imports has them."""

import ast
import textwrap
import tomllib
from pathlib import Path

from scripts.pictures.canvas import Canvas

ROOT = Path(__file__).parents[2]
_SOURCES = (ROOT / "src", ROOT / "packages/fleet/src", ROOT / "packages/lab/src")
_WIDTH, _GAP, _LINE, _CHAR = 820, 8, 17, 6.6


def rooms() -> str:
    """SVG: a room imports only from rows below its own; each is told by its own first words."""
    rows = [[(room, _told(room, len(row))) for room in row] for row in _rows()]
    heights = [_LINE * max(1 + len(told) for _, told in row) + 14 for row in rows]
    canvas = Canvas(
        _WIDTH,
        sum(heights) + _GAP * (len(rows) + 1) + 20,
        "The rooms of the code in rows. A room imports only from rows below its own.",
    )
    y = float(_GAP)
    for row, height in zip(rows, heights, strict=True):
        width = (_WIDTH - _GAP * (len(row) + 1)) / len(row)
        for i, (room, told) in enumerate(row):
            name = room.removeprefix("legato.") + "/"
            canvas.box(_GAP + i * (width + _GAP), y, width, height, [name, *told])
        y += height + _GAP
    canvas.text(_WIDTH - _GAP, y + 12, "imports go down", "faint", "end")
    return canvas.svg()


def _rows() -> list[list[str]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    [layers] = [each["layers"] for each in contracts if each["name"].startswith("Floors: ")]
    return [[room.strip() for room in layer.split("|")] for layer in layers]


def _told(room: str, num_in_row: int) -> list[str]:
    """The first clause of a room's description, without its floor."""
    name = Path(*room.split("."), "__init__.py")
    [path] = [source / name for source in _SOURCES if (source / name).is_file()]
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    clause = said.split(": ", 1)[-1].split(":")[0].split(".")[0].split(",")[0].split(";")[0]
    return textwrap.wrap(clause.replace("`", ""), int(_WIDTH / num_in_row / _CHAR) - 4)
