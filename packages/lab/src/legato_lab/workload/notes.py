"""Notes on how a workload differs from its source."""

import msgspec

from legato_lab.workload.too_long import TooLong


class WorkloadNotes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The differences of a workload from its source; empty if there are none.

    Attributes:
        too_long: None if all requests fit into the model's context.
        num_bad_rows, first_bad_row, num_unanswered: as in `WorkloadFile`.
    """

    too_long: TooLong | None = None
    num_bad_rows: int = 0
    first_bad_row: str | None = None
    num_unanswered: int = 0

    def lines(self) -> list[str]:
        """Return the notes for people."""
        told = []
        if self.num_bad_rows:
            told.append(f"{self.num_bad_rows} malformed rows skipped, first {self.first_bad_row}")
        if self.num_unanswered:
            told.append(f"{self.num_unanswered} rows left out, which have no answer")
        if self.too_long is not None:
            told.append(str(self.too_long))
        return told


NO_NOTES = WorkloadNotes()
