"""The tree of sources as its tests see it: files, imports, and names of classes."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = {
    "legato": ROOT / "src",
    "legato_fleet": ROOT / "packages" / "fleet" / "src",
    "legato_lab": ROOT / "packages" / "lab" / "src",
}
ROOTS = {**DISTRIBUTIONS, "benchmarks": ROOT}
"""Key a package; value the folder that it lies in."""


@cache
def modules() -> dict[str, Path]:
    """Key a module's dotted name; value its file."""
    found: dict[str, Path] = {}
    for package, folder in ROOTS.items():
        for path in sorted((folder / package).rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def sources() -> list[Path]:
    """The files of what is installed: of `modules`, all but the benchmarks."""
    return [path for name, path in modules().items() if package(name) in DISTRIBUTIONS]


def package(module: str) -> str:
    return module.partition(".")[0]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(module: str) -> set[str]:
    """Modules of the same packages that a module imports, at any depth of its code.

    Imports for type checkers alone count: who reads the file follows them, too.
    """
    found: set[str] = set()
    for node in ast.walk(tree(modules()[module])):
        match node:
            case ast.Import(names=names):
                found |= {name.name for name in names}
            case ast.ImportFrom(module=str(origin), names=names, level=0):
                inner = {f"{origin}.{name.name}" for name in names}
                # `from package import module` imports the module, and the package only in passing.
                found |= (inner & modules().keys()) or {origin}
    # The package is where its compiled kernels lie, too: `from legato import _kernels_avx2`.
    return (found & modules().keys()) - {module, "legato"}


def circles() -> list[list[str]]:
    """Groups of two or more modules that import each other, directly or not, sorted."""
    graph = {module: imports(module) for module in modules()}
    return sorted(sorted(group) for group in _components(graph) if len(group) > 1)


def _components(graph: dict[str, set[str]]) -> Iterator[set[str]]:
    """Strongly connected components: what reaches a module and is reached from it (Kosaraju)."""
    order: list[str] = []
    seen: set[str] = set()
    for start in graph:
        _visit(start, graph, seen, order)
    reversed_graph: dict[str, set[str]] = defaultdict(set)
    for module, targets in graph.items():
        for target in targets:
            reversed_graph[target].add(module)
    seen.clear()
    for start in reversed(order):
        if start not in seen:
            group: list[str] = []
            _visit(start, reversed_graph, seen, group)
            yield set(group)


def _visit(start: str, graph: dict[str, set[str]], seen: set[str], finished: list[str]) -> None:
    """Visit what is reached from `start` for the first time; append each when it is done."""
    if start in seen:
        return
    seen.add(start)
    path = [(start, iter(sorted(graph.get(start, ()))))]
    while path:
        _, targets = path[-1]
        target = next((target for target in targets if target not in seen), None)
        if target is None:
            finished.append(path.pop()[0])
        else:
            seen.add(target)
            path.append((target, iter(sorted(graph.get(target, ())))))


def classes() -> dict[str, list[str]]:
    """Key the name of a public class; value the modules of what is installed that define one."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, path in modules().items():
        if package(module) in DISTRIBUTIONS:
            for node in tree(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(module)
    return found
