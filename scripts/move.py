"""Moves modules and whole packages: `python -m scripts.move OLD NEW [OLD NEW ...]` or `@FILE`.

Names are dotted, such as `legato.language.conversation.template`. Files move with `git mv`; imports, dotted names in
strings, and paths in prose follow. A branch comes over a move of main by the same command.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARENTS = {"legato_fleet": "packages/fleet/src", "legato_lab": "packages/lab/src", "legato": "src"}
"""Key a package that has a folder of its own; others lie in the root."""
_FOLDERS = ("src", "packages", "tests", "benchmarks", "scripts", "grafana", "docs", "deploy")
_FILES = ("CONTRIBUTING.md", "README.md", "Makefile", "pyproject.toml", "mkdocs.yml")
_SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".json", ".txt", ".js", ".html", ".cpp", ".h"}


def move(pairs: list[tuple[str, str]]) -> None:
    """Move each module, or each module below each package; later pairs win over earlier ones."""
    modules, folders = {}, {}
    for old, new in pairs:
        if _file(old).is_file():
            modules[old] = new
        else:
            folders[old] = new
            for inner in sorted(p for p in _folder(old).rglob("*") if (p / "__init__.py").exists()):
                below = ".".join(inner.relative_to(_folder(old)).parts)
                folders.setdefault(f"{old}.{below}", f"{new}.{below}")
            for path in sorted(_folder(old).rglob("*.py")):
                inner = ".".join(path.relative_to(_folder(old)).with_suffix("").parts)
                if inner != "__init__" and not inner.endswith(".__init__"):
                    modules.setdefault(f"{old}.{inner}", f"{new}.{inner}")
    texts = {path: path.read_text(encoding="utf-8") for path in _texts()}
    for path, text in texts.items():
        changed = _rewritten(text, path, modules, folders)
        if changed != text:
            path.write_text(changed, encoding="utf-8")
    for old, new in modules.items():
        _git_mv(_file(old), _file(new))
    for old, new in pairs:
        if old not in folders:
            continue
        _git_mv_rest(_folder(old), _folder(new))


def _file(module: str) -> Path:
    return _folder(module).with_suffix(".py")


def _folder(module: str) -> Path:
    parts = module.split(".")
    return ROOT / PARENTS.get(parts[0], ".") / "/".join(parts)


def _texts() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *_FOLDERS, *_FILES],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()
    paths = (ROOT / line for line in listed)
    return [p for p in paths if p.is_file() and (p.suffix in _SUFFIXES or p.name in _FILES)]


def _rewritten(text: str, path: Path, modules: dict[str, str], folders: dict[str, str]) -> str:
    names = {**folders, **modules}
    if path.suffix == ".py":
        text = _with_imports_moved(text, names)
    roots = {name.split(".")[0] for name in names}
    for root in roots:
        text = re.sub(
            rf"(?<![\w.]){root}(?:\.\w+)+", lambda match: _renamed(match[0], names, "."), text
        )
        # Paths: from the root of the tree, from the package, or, in prose, below the package.
        slashed = {old.replace(".", "/"): new.replace(".", "/") for old, new in names.items()}
        text = re.sub(
            rf"(?<![\w/]){root}(?:/\w+)+", lambda match: _renamed(match[0], slashed, "/"), text
        )
        parent = PARENTS.get(root, "")
        if parent:
            text = re.sub(
                rf"(?<![\w/.]){parent}/({root}(?:/\w+)+)",
                lambda match: _moved_path(match[1], slashed),
                text,
            )
            if path.suffix in {".md", ".py", ".toml"}:
                heads = {old.split("/", 1)[1] for old in slashed if "/" in old}
                rooms = "|".join(sorted({re.escape(head.split("/")[0]) for head in heads}))
                text = re.sub(
                    rf"(?<![\w/.])(?:{rooms})/\w+(?:/\w+)*(?=\b)",
                    lambda match: _below(match[0], root, slashed),
                    text,
                )
    return text


def _renamed(name: str, names: dict[str, str], mark: str) -> str:
    """Replace the longest leading part that moves."""
    parts = name.split(mark)
    for end in range(len(parts), 1, -1):
        head = mark.join(parts[:end])
        if head in names:
            return mark.join([names[head], *parts[end:]])
    return name


def _moved_path(name: str, names: dict[str, str]) -> str:
    renamed = _renamed(name, names, "/")
    root = renamed.split("/")[0]
    return f"{PARENTS.get(root, '.')}/{renamed}".removeprefix("./")


def _below(name: str, root: str, names: dict[str, str]) -> str:
    """A path that is not wholly known is something else, such as `text/plain`."""
    return names.get(f"{root}/{name}", f"{root}/{name}").removeprefix(f"{root}/")


def _with_imports_moved(text: str, names: dict[str, str]) -> str:
    """Rewrite `from package import module`, whose module's dotted name stands in no one place."""
    lines = text.splitlines(keepends=True)
    edits: list[tuple[int, int, str]] = []
    renamed: dict[str, str] = {}
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or node.level or node.module is None:
            continue
        moved = [n for n in node.names if f"{node.module}.{n.name}" in names]
        if not moved:
            continue
        indent = " " * node.col_offset
        out = []
        kept = [n for n in node.names if n not in moved]
        if kept:
            out.append(f"{indent}from {node.module} import {', '.join(map(_alias, kept))}\n")
        for name in moved:
            parent, _, last = names[f"{node.module}.{name.name}"].rpartition(".")
            if last != name.name and name.asname is None:
                renamed[name.name] = last
            alias = f" as {name.asname}" if name.asname else ""
            out.append(f"{indent}from {parent} import {last}{alias}\n")
        assert node.end_lineno is not None
        tail = lines[node.end_lineno - 1][node.end_col_offset :].strip()
        if tail:
            out[-1] = out[-1].rstrip("\n") + f"  {tail}\n"
        edits.append((node.lineno - 1, node.end_lineno, "".join(out)))
    for first, last_line, new in sorted(edits, reverse=True):
        lines[first:last_line] = [new]
    text = "".join(lines)
    for old, new in renamed.items():
        text = re.sub(rf"(?<![\w.\"'/]){old}(?=\.\w)", new, text)
    return text


def _alias(name: ast.alias) -> str:
    return f"{name.name} as {name.asname}" if name.asname else name.name


def _git_mv(old: Path, new: Path) -> None:
    if new.exists():
        raise SystemExit(f"{new} exists: {old} cannot become it")
    new.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "mv", str(old), str(new)], cwd=ROOT, check=True)
    source = old.parent / "__init__.py"
    for folder in [new.parent, *new.parents]:
        if folder.name in {"src", *PARENTS, "."} or folder == ROOT:
            break
        if not (folder / "__init__.py").exists() and source.exists():
            (folder / "__init__.py").write_text(source.read_text(encoding="utf-8"))
            subprocess.run(["git", "add", str(folder / "__init__.py")], cwd=ROOT, check=True)


def _git_mv_rest(old: Path, new: Path) -> None:
    """Move what is no module: `__init__` where the new package has none, and files of data."""
    listed = subprocess.run(
        ["git", "ls-files", "--", str(old)], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    for line in listed:
        path = ROOT / line
        target = new / path.relative_to(old)
        if target.name == "__init__.py" and target.exists():
            subprocess.run(["git", "rm", "-q", "-f", str(path)], cwd=ROOT, check=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["git", "mv", str(path), str(target)], cwd=ROOT, check=True)


def _pairs(arguments: list[str]) -> list[tuple[str, str]]:
    if len(arguments) == 1 and arguments[0].startswith("@"):
        text = Path(arguments[0][1:]).read_text(encoding="utf-8")
        arguments = [w for line in text.splitlines() for w in line.split("#")[0].split()]
    return list(zip(arguments[::2], arguments[1::2], strict=True))


if __name__ == "__main__":
    move(_pairs(sys.argv[1:]))
