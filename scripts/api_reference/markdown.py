"""Pieces of Markdown."""

from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table without its empty columns; nothing where there are no rows."""
    told = [column for column in zip(heads, *rows, strict=True) if any(column[1:])]
    lines = [_row(cells) for cells in zip(*told, strict=True)]
    return "\n".join([lines[0], "|" + "---|" * len(told), *lines[1:]]) if lines else ""


def items(rows: Iterable[tuple[str, str]]) -> str:
    """Return a list of things, each with its words, if there are any."""
    return "\n".join(f"- {thing}: {words}" if words else f"- {thing}" for thing, words in rows)


def code(text: str) -> str:
    return f"`{text}`"


def clause(words: str) -> str:
    """Words as they stand in a cell: without the full stop at their end."""
    return words.removesuffix(".")


def uncapitalized(words: str) -> str:
    """Return words that go on a sentence; a name like JSON or SGLang keeps its capitals."""
    first = words.partition(" ")[0]
    return words[0].lower() + words[1:] if first == first.capitalize() else words


def _row(cells: Sequence[str]) -> str:
    inner = " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {inner} |"
