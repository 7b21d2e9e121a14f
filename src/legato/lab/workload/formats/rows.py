"""What all formats have in common: rows, of which some may be malformed."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from legato.core.errors import ConfigError
from legato.simulation.workload import Workload, WorkloadRequest


class Rows(NamedTuple):
    """A file's rows.

    Attributes:
        rows: where each is, as a line or in words, and the row itself.
        read: the requests of a row; none where it was never answered. Raises ValueError where the
            row is malformed.
        are_slow: to read, and in the order in which they are sent: no more are read than are asked
            for.
    """

    rows: Iterable[tuple[int | str, Any]]
    read: Callable[[Any], Sequence[WorkloadRequest]]
    are_slow: bool = False


class WorkloadFile(msgspec.Struct, frozen=True, kw_only=True):
    """What was read.

    Attributes:
        num_bad_rows: that were skipped because they are malformed.
        first_bad_row: where the first of them is, and what is wrong with it.
        num_unanswered: rows that were left out because there was no answer.
    """

    requests: Workload
    num_bad_rows: int = 0
    first_bad_row: str | None = None
    num_unanswered: int = 0


def read_rows(
    path: Path, rows: Rows, *, skip_bad_rows: bool = False, most: int | None = None
) -> WorkloadFile:
    """All requests, in the order of their rows.

    Args:
        most: how many are asked for at least, where the rows are slow to read.

    Raises:
        ConfigError: a row is malformed, and that is not to be skipped.
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
