"""Pieces of Markdown."""

from collections.abc import Iterable


def items(rows: Iterable[tuple[str, str]]) -> str:
    """Return a list of things, each with its words, if there are any."""
    return "\n".join(f"- {thing}: {words}" if words else f"- {thing}" for thing, words in rows)


def code(text: str) -> str:
    return f"`{text}`"


def clause(words: str) -> str:
    """Return words without the full stop at their end."""
    return words.removesuffix(".")
