"""Lists a step's runs for the kernels of recurrent layers, which the host writes.

A run is one request's rows. A *piece* is a part of a run of several rows; it ends at a multiple of
`PIECE`, or with its run. The list's lengths depend only on the step's number of rows, so a captured
graph runs any step of its size: a run or a piece without rows does nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from legato.model.recurrence import PIECE
from legato.model.states import StateRun

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

RUN_FIELDS = 6
"""first row, end, position, source, destination, whether the state is kept after each row."""
PIECE_FIELDS = 2
"""first row, number of rows."""


class StateWork(NamedTuple):
    """A step's runs on the device, int32.

    Attributes:
        run_of_row: [P], index of each row's run; padding is outside of the run that it names.
        slot_of_row: [P], slot that keeps the state after the row; -1 if it is not kept.
        runs: [R, RUN_FIELDS], those of the most rows first.
        pieces: [N, PIECE_FIELDS], of runs that keep only their last state; none if each run has one
            row.
        num_long_runs: the first runs, which have several rows or none.
    """

    run_of_row: torch.Tensor
    slot_of_row: torch.Tensor
    runs: torch.Tensor
    pieces: torch.Tensor
    num_long_runs: int


class StateWorkShape(NamedTuple):
    """The lengths of the lists of steps with `num_rows` rows, as in `StateWork`."""

    num_rows: int
    num_runs: int
    num_pieces: int
    num_long_runs: int

    @classmethod
    def of(cls, num_rows: int, max_runs: int, *, has_chunks: bool) -> "StateWorkShape":
        """Return the shape of steps of at most `max_runs` runs.

        Args:
            has_chunks: whether a run may have several rows.
        """
        # Of a run's pieces, all but the first and the last have PIECE rows.
        num_long_runs = min(num_rows // 2, max_runs) if has_chunks else 0
        num_pieces = num_rows // PIECE + 2 * num_long_runs if has_chunks else 0
        return cls(num_rows, min(num_rows, max_runs), num_pieces, num_long_runs)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The numbers of int32 that each list takes in a step's inputs."""
        num_rows = self.num_rows
        return num_rows, num_rows, RUN_FIELDS * self.num_runs, PIECE_FIELDS * self.num_pieces

    def views(self, section: torch.Tensor) -> StateWork:
        """Return the device's lists in a step's inputs: views of `section`, int32 [sum(sizes)]."""
        run_of_row, slot_of_row, runs, pieces = section.split_with_sizes(list(self.sizes))
        return StateWork(
            run_of_row,
            slot_of_row,
            runs.view(-1, RUN_FIELDS),
            pieces.view(-1, PIECE_FIELDS),
            self.num_long_runs,
        )

    def write(self, section: Int32s, runs: Sequence[StateRun]) -> None:
        """Write a step's lists to `section`, as `views` has it.

        Args:
            runs: at most num_runs, adjacent, from row 0 on.
        """
        section[:] = 0
        run_of_row, slot_of_row, run_section, piece_section = np.split(
            section, np.cumsum(self.sizes)[:-1]
        )
        table = np.array([(*run[:5], bool(run.earlier)) for run in runs])
        counts = table[:, 1] - table[:, 0]
        order = np.argsort(-counts, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        run_of_row[: counts.sum()] = place.repeat(counts)
        slot_of_row[:] = -1
        slot_of_row[table[:, 1] - 1] = table[:, 4]
        for run in runs:
            if run.earlier:
                slot_of_row[run.start : run.end - 1] = run.earlier
        run_section[: table.size] = table[order].ravel()
        pieces = _pieces(table[(counts > 1) & (table[:, 5] == 0)])
        assert pieces.size <= piece_section.size, "a step with chunks has the size of one without"
        piece_section[: pieces.size] = pieces.ravel()


def _pieces(runs: Int64s) -> Int64s:
    """Return the pieces [N, PIECE_FIELDS] of runs."""
    start, end, position = runs[:, 0], runs[:, 1], runs[:, 2]
    stop = position + end - start
    first = position // PIECE
    counts = -(-stop // PIECE) - first
    run = np.arange(len(runs)).repeat(counts)
    index = first[run] + np.arange(len(run)) - (counts.cumsum() - counts)[run]
    low = np.maximum(index * PIECE, position[run])
    high = np.minimum((index + 1) * PIECE, stop[run])
    return np.stack([start[run] + low - position[run], high - low], axis=1)
