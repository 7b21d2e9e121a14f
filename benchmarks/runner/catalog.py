"""Which benchmarks there are: each module here that sets `MINUTES`.

They are read and not imported: some need packages that are not installed everywhere.
"""

import ast
from pathlib import Path

import msgspec

_PACKAGE = Path(__file__).parents[1]
_MINUTES = "MINUTES"


class Benchmark(msgspec.Struct, frozen=True):
    """One of them.

    Attributes:
        name: for `python -m benchmarks NAME`.
        module: that has its `add_flags` and `measure`.
        question: the first line of its docstring.
        minutes: that it takes with its default flags on two cores, about.
    """

    name: str
    module: str
    question: str
    minutes: float


def benchmarks() -> list[Benchmark]:
    """All of them, by name."""
    found = (_read(path) for path in _PACKAGE.rglob("*.py"))
    return sorted((one for one in found if one is not None), key=lambda one: one.name)


def benchmark(name: str) -> Benchmark:
    """The one of that name."""
    return next(one for one in benchmarks() if one.name == name)


def _read(path: Path) -> Benchmark | None:
    """None where the module is no benchmark."""
    text = path.read_text(encoding="utf-8")
    if f"\n{_MINUTES} = " not in text:
        return None
    tree = ast.parse(text)
    parts = path.relative_to(_PACKAGE).with_suffix("").parts
    name = ".".join(part for part in parts if part != "__main__")
    question = (ast.get_docstring(tree) or "").partition("\n")[0]
    module = ".".join((_PACKAGE.name, *parts))
    return Benchmark(name, module, question, _minutes(tree))


def _minutes(tree: ast.Module) -> float:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _MINUTES:
            return float(ast.literal_eval(node.value))
    raise ValueError(f"{_MINUTES} is not set at the top of a module")
