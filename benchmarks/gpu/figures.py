"""What a part of the benchmark found, beside what the machine allows."""

from collections.abc import Callable, Sequence

import msgspec

UNENDED = "it did not end"
"""Failure of a part that has some of its figures, but not all."""


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One figure.

    Attributes:
        unit: "ms" or another time, where less is better, or something a second.
        least: what the machine's roofline allows, in the same unit.
        target: how many times that is good enough.
        limit: what was promised of it, in the same unit.
        clock_mhz: of the multiprocessors, just after it was measured.
    """

    name: str
    value: float
    unit: str
    least: float | None = None
    target: float | None = None
    limit: float | None = None
    clock_mhz: int | None = None

    @property
    def ratio(self) -> float | None:
        """How many times slower than the roofline allows."""
        if not self.least or not self.value:
            return None
        return self.least / self.value if self.unit.endswith("/s") else self.value / self.least


class Figures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of one part.

    Attributes:
        seconds: that it took.
        failure: why there is not all of it; empty where there is.
    """

    title: str
    rows: Sequence[Row] = ()
    notes: Sequence[str] = ()
    seconds: float = 0.0
    failure: str = ""


class PartFailedError(Exception):
    """Why a part of the benchmark has not all its figures."""


class Report:
    """Takes a part's figures as they come.

    Args:
        keep: is given all figures so far, each time that there are more.
        clock: returns `Row.clock_mhz`.
    """

    def __init__(
        self,
        title: str,
        keep: Callable[[Figures], None] = lambda _: None,
        clock: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._title = title
        self._keep = keep
        self._clock = clock
        self._rows: dict[str, Row] = {}  # key the row's name
        self._notes: list[str] = []

    def add(self, *rows: Row) -> None:
        """Rows replace earlier ones of the same name."""
        clock_mhz = self._clock()
        self._rows |= {row.name: msgspec.structs.replace(row, clock_mhz=clock_mhz) for row in rows}
        self._keep(self.figures(UNENDED))

    def note(self, text: str) -> None:
        """Args: text: in Markdown."""
        self._notes.append(text)
        self._keep(self.figures(UNENDED))

    def figures(self, failure: str = "") -> Figures:
        """All so far."""
        return Figures(
            title=self._title, rows=[*self._rows.values()], notes=[*self._notes], failure=failure
        )


def section(figures: Figures) -> str:
    """In Markdown."""
    parts = [f"## {figures.title}"]
    if figures.failure:
        parts.append(f"**Failed**: {figures.failure}")
    if figures.rows:
        parts.append(_table(figures.rows))
    parts += figures.notes
    parts.append(f"This part took {figures.seconds:.0f} s.")
    return "\n\n".join(parts)


def _table(rows: Sequence[Row]) -> str:
    """Only with columns that a row has something for."""
    columns = {
        "": [row.name for row in rows],
        "measured": [_told(row.value, row.unit) for row in rows],
        "promised": [_told(row.limit, row.unit) for row in rows],
        "roofline": [_told(row.least, row.unit) for row in rows],
        "ratio": [_told(row.ratio, "") for row in rows],
        "target": [_told(row.target, "") for row in rows],
        "clock": [_told(row.clock_mhz, "MHz") for row in rows],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    lines = [list(shown), ["---"] * len(shown), *map(list, zip(*shown.values(), strict=True))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _told(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    digits = 0 if value == int(value) else 3 if value < 1 else 2 if value < 100 else 0
    return f"{value:,.{digits}f} {unit}".rstrip()
