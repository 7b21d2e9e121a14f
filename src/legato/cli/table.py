"""Tables in the terminal, and the format of their values."""

from typing import Literal

import msgspec
import rich.table
from rich.console import Console

from legato.observe.distribution import Distribution

NOTHING = "–"
"""Stands for a missing value."""


_WIDTH = 160
"""Columns in a file, which no window limits."""


class Table(msgspec.Struct, frozen=True):
    """Attributes: rows: as wide as the header; the first column names each."""

    title: str
    header: list[str]
    rows: list[list[str]]


def duration(seconds: float | None) -> str:
    """Format a duration for people."""
    if seconds is None:
        return NOTHING
    if abs(seconds) >= 1.0:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.{0 if abs(seconds) >= 0.01 else 1}f} ms"


def percentile_of(values_s: Distribution | None, which: Literal["p50", "p99"]) -> str:
    """Format a percentile for people."""
    return duration(None if values_s is None else getattr(values_s, which))


def print_table(table: Table) -> None:
    drawn = rich.table.Table(title=table.title, title_justify="left")
    for index, name in enumerate(table.header):
        drawn.add_column(name, justify="right" if index else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(drawn)
