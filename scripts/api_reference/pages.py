"""The pages, and their generated parts."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from scripts.api_reference import flags, http_api, limits, models, python_api

_DOCS = Path(__file__).parents[2] / "docs"
_PART = re.compile(r"(<!--generated:(\S+)-->\n).*?(<!--end-->)", re.DOTALL)

PAGES: dict[Path, Callable[[], Mapping[str, Callable[[], str]]]] = {
    _DOCS / "reference" / "python.md": python_api.parts,
    _DOCS / "reference" / "http.md": http_api.parts,
    _DOCS / "reference" / "limits.md": limits.parts,
    _DOCS / "reference" / "flags.md": flags.parts,
    _DOCS / "reference" / "models.md": models.parts,
}
"""Key a page; value gives its parts, key the part's name."""


def rendered(page: Path) -> str:
    """The page as it should be.

    Raises:
        ValueError: the page lacks a part, or has one that there is not.
    """
    text = page.read_text(encoding="utf-8")
    parts = PAGES[page]()
    named = [name for _, name, _ in _PART.findall(text)]
    if sorted(named) != sorted(parts):
        raise ValueError(f"{page.name} has the parts {named}, not {list(parts)}")
    return _PART.sub(lambda match: f"{match[1]}{parts[match[2]]()}\n{match[3]}", text)
