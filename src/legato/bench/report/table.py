"""What a table is, and how its values are written."""

from typing import Literal

import msgspec

from legato.bench.report.summary import Distribution

NOTHING = "–"
"""Where there is no value."""


class Table(msgspec.Struct, frozen=True):
    """Attributes: rows: as wide as the header; the first column names each."""

    title: str
    header: list[str]
    rows: list[list[str]]


def duration(seconds: float | None) -> str:
    """For people to read."""
    if seconds is None:
        return NOTHING
    if abs(seconds) >= 1.0:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.{0 if abs(seconds) >= 0.01 else 1}f} ms"


def percentile_of(values_s: Distribution | None, which: Literal["p50", "p99"]) -> str:
    """One of them, for people to read."""
    return duration(None if values_s is None else getattr(values_s, which))
