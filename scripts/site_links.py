"""A hook of mkdocs: links from docs/ to the rest of the repository become plain text there."""

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(((?:\.\./)+[^)\s]*)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs calls this for each page."""
    return without_outer_links(markdown, page.file.src_uri)


def without_outer_links(markdown: str, page: str) -> str:
    """The page without links that lead out of docs/; `page` is its path in docs/."""

    def text_or_link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), match[2]))
        return match[1] if target.startswith("..") else match[0]

    return _LINK.sub(text_or_link, markdown)
