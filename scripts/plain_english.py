"""Lists phrases that the project does not write: `python -m scripts.plain_english`.

Each avoids its noun, or takes a verb where the field has a better one. Pages, docstrings and
comments are read, those of tests too.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

_PHRASES = (
    r"whoever|whomever|whosever|whosesoever|whatever",
    r"nobody|no one|anybody|somebody|everybody",
    r"of which|of whom",
    r"tells? of|told of",
    r"takes? it that",
    r"(?:is|are) there to",
    r"so much for|as it were",
    r"those that|who(?= (?:has|is|may|asks|takes|sends|comes) )",
    r"(?:\A|(?<=[.:] ))(?:Of|What) (?:what|those|all)",
)
_PHRASE = re.compile(rf"\b(?:{'|'.join(_PHRASES)})\b", re.IGNORECASE)
_NOT_PROSE = re.compile(
    r"<!--generated:.*?<!--end-->|^(?: {4}|\t)[^\n]*$|```.*?```|`[^`]*`|\]\([^)]*\)",
    re.MULTILINE | re.DOTALL,
)
_ROOMS = "src", "packages", "benchmarks", "scripts", "grafana", "tests"
_GENERATED = ROOT / "docs" / "contributing" / "seams.md"


def main() -> int:
    found = phrases()
    print("\n".join(found) or "none")
    return int(bool(found))


def phrases() -> list[str]:
    """Each phrase of the project with its file and line."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
    pages += ROOT.glob("packages/*/*.md")
    modules = [file for room in _ROOMS for file in ROOT.glob(f"{room}/**/*.py")]
    return [
        f"{file.relative_to(ROOT)}:{line}: {phrase}"
        for file in sorted({*pages, *modules} - {_GENERATED})
        for line, phrase in in_file(file)
    ]


def in_file(file: Path) -> Iterator[tuple[int, str]]:
    source = file.read_text(encoding="utf-8")
    if not _PHRASE.search(source):
        return
    texts = _prose_of_python(source) if file.suffix == ".py" else [(1, _without_code(source))]
    for first, text in texts:
        for match in _PHRASE.finditer(text):
            yield first + text.count("\n", 0, match.start()), " ".join(match[0].split())


def _without_code(markdown: str) -> str:
    """Markdown whose code and generated parts are blank, line by line."""
    return _NOT_PROSE.sub(lambda match: "\n" * match[0].count("\n"), markdown)


def _prose_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Comments and docstrings, those of attributes too, with their first line."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


if __name__ == "__main__":
    sys.exit(main())
