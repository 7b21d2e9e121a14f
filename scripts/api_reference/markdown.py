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


def uncapitalized(words: str) -> str:
    """Return words that go on a sentence; a name like JSON or SGLang keeps its capitals."""
    first = words.partition(" ")[0]
    return words[0].lower() + words[1:] if first == first.capitalize() else words
