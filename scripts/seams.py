"""Writes docs/contributing/seams.md from the sources' protocols: `python -m scripts.seams`."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from scripts.api_reference.markdown import code, items

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "contributing" / "seams.md"
# Paths are told from there.
_SOURCES = (ROOT / "src" / "legato", *sorted(ROOT.glob("packages/*/src")))
_TESTS = ROOT / "tests"

_INTRODUCTION = """# Which seams are there?
A seam is a protocol: a class that states what one part of Legato needs from another part, so that
the two do not import each other. `python -m scripts.seams` writes this list of the `Protocol`
classes in `src/legato` and `packages`, each with the classes that have all of its members.

A seam is built together with its second implementation. `LayerWatch` alone has one: with it, the
model calls back into a floor above its own.
"""


@dataclass(frozen=True)
class Class:
    """A class as its source has it."""

    name: str
    path: Path
    bases: frozenset[str]
    members: frozenset[str]
    summary: str


@dataclass
class Seam:
    """A protocol, and the classes that implement it."""

    protocol: Class
    implementations: list[Class] = field(default_factory=list)


def text() -> str:
    return f"{_INTRODUCTION}\n{items(map(_item, seams()))}\n"


def _item(seam: Seam) -> tuple[str, str]:
    own = _names(cls for cls in seam.implementations if _is_source(cls.path))
    tests = _names(cls for cls in seam.implementations if cls.path.is_relative_to(_TESTS))
    words = f"{seam.protocol.summary} {own}" + (f"; in tests {tests}" if tests else "")
    return f"{code(seam.protocol.name)} in {code(_place(seam.protocol.path))}", words


def _names(classes: Iterable[Class]) -> str:
    return ", ".join(code(name) for name in sorted({cls.name for cls in classes}))


@cache
def seams() -> list[Seam]:
    """All protocols, sorted by file."""
    classes = list(_classes())
    protocols = [cls for cls in classes if "Protocol" in cls.bases and _is_source(cls.path)]
    members = {cls: _inherited(cls, classes) for cls in classes}
    return [
        Seam(
            protocol,
            [
                cls
                for cls in classes
                if "Protocol" not in cls.bases
                and members[protocol]
                and (protocol in _bases(cls, classes) or members[protocol] <= members[cls])
            ],
        )
        for protocol in protocols
    ]


def _classes() -> Iterator[Class]:
    for path in (path for root in (*_SOURCES, _TESTS) for path in sorted(root.rglob("*.py"))):
        source = path.read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                yield Class(
                    node.name,
                    path,
                    frozenset(_base_name(base) for base in node.bases),
                    frozenset(_members(node)),
                    (ast.get_docstring(node) or "").split("\n")[0],
                )


def _members(cls: ast.ClassDef) -> Iterator[str]:
    """Names of methods, and of attributes of the class or of `self`."""
    for node in ast.walk(cls):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
    for statement in cls.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield name


def _base_name(base: ast.expr) -> str:
    if isinstance(base, ast.Subscript):
        base = base.value
    return ast.unparse(base).rpartition(".")[2]


def _inherited(cls: Class, classes: list[Class]) -> frozenset[str]:
    """Its members and those of its bases, without the special ones."""
    found = set(cls.members)
    for base in _bases(cls, classes):
        found |= _inherited(base, classes)
    return frozenset(name for name in found if not name.startswith("__"))


def _bases(cls: Class, classes: list[Class]) -> Iterator[Class]:
    """Its bases: a class of that name in its own file, else in the sources."""
    for name in cls.bases - {cls.name}:
        named = [base for base in classes if base.name == name]
        own = [base for base in named if base.path == cls.path]
        yield from own or (base for base in named if _is_source(base.path))


def _is_source(path: Path) -> bool:
    return any(path.is_relative_to(root) for root in _SOURCES)


def _place(path: Path) -> str:
    (root,) = (root for root in _SOURCES if path.is_relative_to(root))
    return path.relative_to(root).as_posix()


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
    print(PAGE)
