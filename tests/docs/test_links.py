"""What the documentation names exists: files, headings, commands, flags, metrics.

A path in the text counts as found where any path of the repository ends with it, so that a table
may name files as they are called in their room: `block_pool.py`, `kv/block_pool.py`, `tiles_*.hpp`.
"""

import io
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path, PurePosixPath

import pytest
from grafana import reference
from markdown_it import MarkdownIt
from markdown_it.token import Token

from legato.cli.main import main
from tests import house

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/*.md")])
FOLDERS = ("benchmarks", "docs", "grafana", "native", "packages", "scripts", "src", "tests")
PATHS = [
    PurePosixPath(path.relative_to(ROOT))
    for path in [
        *ROOT.iterdir(),
        *(path for name in FOLDERS for path in ROOT.joinpath(name).rglob("*")),
    ]
    if "__pycache__" not in path.parts
]
ROOMS = {path.parts[2] for path in PATHS if len(path.parts) > 3 and path.parts[0] == "src"}
ROOMS |= house.DISTRIBUTIONS.keys() - {"legato"}
SOURCE = re.compile(r"(?!out/)[\w./*-]+\.(?:cpp|css|hpp|js|md|png|py|svg|toml|yml)")
FOLDER = re.compile(rf"(?:{'|'.join([*FOLDERS, *ROOMS])})/[\w./-]*")
MODULE = re.compile(rf"python -m ((?:{'|'.join(FOLDERS)})[\w.]*)")
TARGET = re.compile(r"\bmake ([a-z][a-z-]*)")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
COMMAND = re.compile(r"^    (\w+)(?: |$)", re.MULTILINE)
METRIC = re.compile(r"\blegato:(\w+)\b(?!\*)")
FIGURE = re.compile(r"(?<![\w.])\d[\d.,-]*\d")
SLUG = re.compile(r"[^\w\- ]")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@each_page
def test_no_conflict_of_a_merge_is_left(page: Path) -> None:
    assert not re.search("^(<<<<<<<|>>>>>>>) ", page.read_text(encoding="utf-8"), re.MULTILINE)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    lost = {link for link in links(page) if not is_there(page, link)}
    assert not lost


@each_page
def test_paths_exist(page: Path) -> None:
    named = [text for text in code(page) if SOURCE.fullmatch(text) or FOLDER.fullmatch(text)]
    lost = {text for text in named if not any(path.match(text) for path in PATHS)}
    assert not lost


@each_page
def test_commands_exist(page: Path) -> None:
    written = "\n".join(code(page))
    modules = [PurePosixPath(name.replace(".", "/")) for name in MODULE.findall(written)]
    lost = [path for path in modules if not {path, path.with_suffix(".py")} & set(PATHS)]
    assert not lost
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert not set(TARGET.findall(written)) - targets


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """Those of all commands that are named."""
    tried = [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("benchmarks/clients/scripts/*.mjs")]
    benchmarks = [path.read_text() for path in tried]
    # Flags of other projects' routers are tried there.
    tests = [
        ROOT / "tests" / name
        for name in (
            "conftest.py",
            "fuzz/__main__.py",
            "api/test_disaggregation.py",
            "api/test_existing_routers.py",
        )
    ]
    others = [*tests, ROOT / "Makefile"]
    others += ROOT.glob("scripts/*.py")
    texts = [*usages(), *benchmarks, *(path.read_text() for path in others)]
    return {flag for text in texts for flag in FLAG.findall(text)}


@each_page
def test_flags_exist(page: Path, flags: set[str]) -> None:
    if page.name in ("claude-code.md", "comparison.md"):
        pytest.skip("names other programs' flags")
    assert not {flag for text in code(page) for flag in FLAG.findall(text)} - flags


def test_figures_of_the_first_page_stand_on_the_benchmarks_page() -> None:
    """There, each has its command, both sides' flags and its day."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text[text.index("| vLLM") : text.index("[How each figure")]
    benchmarks = (ROOT / "docs/contributing/benchmarks.md").read_text(encoding="utf-8")
    assert set(FIGURE.findall(table)) <= set(FIGURE.findall(benchmarks))


@pytest.fixture(scope="module")
def metrics() -> set[str]:
    """Names of all metrics, as Prometheus shows them, without the prefix."""
    names = {metric.name.removeprefix("legato:") for metric in reference.declared()}
    suffixes = ("", "_total", "_bucket", "_sum", "_count")
    return {name + suffix for name in names for suffix in suffixes}


@each_page
def test_metrics_exist(page: Path, metrics: set[str]) -> None:
    assert not {name for text in code(page) for name in METRIC.findall(text)} - metrics


def usages(*command: str) -> Iterator[str]:
    """What `--help`, or `--help all`, says of a command and of those below it."""
    said = helped(*command, "--help")
    yield helped(*command, "--help", "all") if "--help all" in said else said
    for name in COMMAND.findall(said):
        yield from usages(*command, name)


def helped(*arguments: str) -> str:
    said = io.StringIO()
    with pytest.raises(SystemExit), redirect_stdout(said):
        main(arguments)
    return said.getvalue()


def test_what_is_lost_is_found() -> None:
    """The checks above see something on the pages that there are."""
    all_links = [link for page in PAGES for link in links(page)]
    assert sum("#" in link for link in all_links) > 10
    assert not is_there(ROOT / "README.md", "docs/concepts/memory.md#the-premise")
    assert not is_there(ROOT / "README.md", "docs/concepts/premise.md")
    all_code = [text for page in PAGES for text in code(page)]
    assert sum(bool(SOURCE.fullmatch(text)) for text in all_code) > 50
    assert sum(bool(FOLDER.fullmatch(text)) for text in all_code) > 10
    assert not any(path.match("kv/scheduler.py") for path in PATHS)


@cache
def tokens(page: Path) -> list[Token]:
    parser = MarkdownIt("commonmark").enable("table")
    parsed = parser.parse(page.read_text(encoding="utf-8"))
    return [one for token in parsed for one in (token, *(token.children or ()))]


def links(page: Path) -> list[str]:
    """Targets of links and pictures, but for those elsewhere."""
    targets = [str(token.attrs.get("href", token.attrs.get("src", ""))) for token in tokens(page)]
    return [target for target in targets if target and "://" not in target]


def code(page: Path) -> list[str]:
    """What stands between backticks, and blocks of code."""
    kinds = ("code_inline", "code_block", "fence")
    return [token.content for token in tokens(page) if token.type in kinds]


def is_there(page: Path, link: str) -> bool:
    target, _, heading = link.partition("#")
    file = page.parent / target if target else page
    return file.exists() and (not heading or heading in slugs(file))


@cache
def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found, is_heading = set(), False
    for token in tokens(page):
        if is_heading and token.type == "inline":
            text = "".join(child.content for child in token.children or ())
            found.add(SLUG.sub("", text.lower()).replace(" ", "-"))
        is_heading = token.type == "heading_open" or (is_heading and token.type != "heading_close")
    return found
