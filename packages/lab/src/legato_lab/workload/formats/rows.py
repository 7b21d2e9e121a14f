"""Rows of a file in any format; some may be malformed."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from legato.core.errors import ConfigError
from legato_lab.simulation.workload import Workload, WorkloadRequest


class Rows(NamedTuple):
    """A file's rows.

    Attributes:
        rows: the place of each, a line or in words, and the row itself.
        read: returns the requests of a row; none if it was never answered. Raises ValueError if the
            row is malformed.
        are_slow: whether reading is slow; such rows are in the order of sending, and only as many
            are read as needed.
    """

    rows: Iterable[tuple[int | str, Any]]
    read: Callable[[Any], Sequence[WorkloadRequest]]
    are_slow: bool = False


class WorkloadFile(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of a file.

    Attributes:
        num_bad_rows: malformed rows that were skipped.
        first_bad_row: the place of the first of them, and its error.
        num_unanswered: rows that were left out because they have no answer.
    """

    requests: Workload
    num_bad_rows: int = 0
    first_bad_row: str | None = None
    num_unanswered: int = 0


def read_rows(
    path: Path, rows: Rows, *, skip_bad_rows: bool = False, most: int | None = None
) -> WorkloadFile:
    """Read all requests, in the order of their rows.

    Args:
        most: enough requests, if the rows are slow to read.

    Raises:
        ConfigError: a row is malformed, and must not be skipped.
    """
    requests: Workload = []
    bad, num_unanswered = _BadRows(path, skip_bad_rows), 0
    for place, row in rows.rows:
        try:
            found = rows.read(row)
        except ValueError as error:
            bad.note(place, error)
            continue
        requests += found
        num_unanswered += not found
        if rows.are_slow and most is not None and len(requests) >= most:
            break
    return WorkloadFile(
        requests=requests,
        num_bad_rows=bad.count,
        first_bad_row=bad.first,
        num_unanswered=num_unanswered,
    )


class _BadRows:
    def __init__(self, path: Path, may_skip: bool) -> None:
        self._path = path
        self._may_skip = may_skip
        self.count = 0
        self.first: str | None = None

    def note(self, place: int | str, error: ValueError) -> None:
        if not self._may_skip:
            raise ConfigError(f"{self._path}:{place}: {error}") from error
        self.count += 1
        self.first = self.first or f"{self._path}:{place}: {error}"
