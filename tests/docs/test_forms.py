"""The forms of a request on its way: each that the page names exists where it says."""

import ast
import re
from pathlib import Path

import legato

SOURCES = Path(legato.__file__).parent
PAGE = Path("docs/contributing/architecture.md")
NUM_IN, NUM_OUT = 8, 7
"""Each form is a conversion, and fields to carry over: one more must pay for itself."""
_TABLE = re.compile(r"^\| (in|out) \| \| \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", re.MULTILINE)
_ROW = re.compile(r"^\| (?:`(\w+)`|bytes) \| `([\w/]+\.py)` \|", re.MULTILINE)


def test_forms_are_those_of_the_page() -> None:
    tables = {name: _ROW.findall(rows) for name, rows in _TABLE.findall(PAGE.read_text())}
    assert {name: len(rows) for name, rows in tables.items()} == {"in": NUM_IN, "out": NUM_OUT}
    for form, path in [*tables["in"], *tables["out"]]:
        names = _classes(SOURCES / path)
        assert not form or form in names, f"{path} has no class {form}"


def _classes(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
