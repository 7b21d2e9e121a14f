"""Counts phrases that the project no longer writes: `python -m scripts.plain_english`.

Each avoids its noun ("whoever asks") or takes a verb where the field has a better one ("is told
of"). Pages, docstrings and comments are counted. plain_english.json has the number that each file
may have. A file with more phrases fails the check, and one with fewer asks for `--lower`.
"""

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALLOWED = Path(__file__).with_suffix(".json")

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
    r"<!-- generated: .*?<!-- end -->|^(?: {4}|\t)[^\n]*$|```.*?```|`[^`]*`|\]\([^)]*\)",
    re.MULTILINE | re.DOTALL,
)
_GENERATED = ROOT / "docs" / "contributing" / "seams.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="print each phrase and its place")
    parser.add_argument("--lower", action="store_true", help="write the numbers that became lower")
    parser.add_argument("--write", action="store_true", help="write all numbers, higher ones too")
    args = parser.parse_args()
    found = phrases()
    if args.all:
        for name, places in found.items():
            for line, phrase in places:
                print(f"{name}:{line}: {phrase}")
    counts = {name: len(places) for name, places in found.items() if places}
    if args.lower or args.write:
        most = counts if args.write else allowed()
        kept = {name: min(counts[name], most[name]) for name in counts.keys() & most.keys()}
        ALLOWED.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    complaints = wrong(found, allowed())
    print("\n".join(complaints) or f"{sum(counts.values())} phrases in {len(counts)} files")
    return int(bool(complaints))


def phrases() -> dict[str, list[tuple[int, str]]]:
    """Key a file's path, value the line and the words of each phrase in it."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    files = {*pages, *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py")} - {_GENERATED}
    return {file.relative_to(ROOT).as_posix(): list(in_file(file)) for file in sorted(files)}


def allowed() -> Mapping[str, int]:
    """Key a file's path, value how many phrases it may have."""
    numbers: dict[str, int] = json.loads(ALLOWED.read_text(encoding="utf-8"))
    return numbers


def wrong(found: Mapping[str, list[tuple[int, str]]], most: Mapping[str, int]) -> list[str]:
    """A message for each file that has more phrases than it may have, or fewer."""
    complaints = []
    for name, places in found.items():
        limit = most.get(name, 0)
        if len(places) > limit:
            told = ", ".join(f"line {line} “{phrase}”" for line, phrase in places)
            complaints.append(f"{name} may have {limit} and has {len(places)}: {told}")
        elif len(places) < limit:
            complaints.append(
                f"{name} has {len(places)} and may have {limit}: "
                "run `python -m scripts.plain_english --lower`"
            )
    gone = most.keys() - found.keys()
    return complaints + [f"{name} is gone: run with `--lower`" for name in sorted(gone)]


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
