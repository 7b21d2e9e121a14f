"""A hook of mkdocs: differences between the pages on GitHub and on the site."""

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(((?:\.\./)+[^)\s]*)\)")
_CODE_IN_ROW = re.compile(r"`[^`\n]*`")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change a page for the site; mkdocs calls this for each page."""
    return with_plain_pipes(without_outer_links(markdown, page.file.src_uri))


def without_outer_links(markdown: str, page: str) -> str:
    """Turn links that lead out of docs/ into their text; `page` is a path in docs/."""

    def text_or_link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), match[2]))
        return match[1] if target.startswith("..") else match[0]

    return _LINK.sub(text_or_link, markdown)


def with_plain_pipes(markdown: str) -> str:
    """Unescape pipes in code in tables, whose backslashes the site would show."""
    return "\n".join(
        _CODE_IN_ROW.sub(lambda match: match[0].replace(r"\|", "|"), line)
        if line.startswith("|")
        else line
        for line in markdown.split("\n")
    )
