"""Costs of the parts of a step: the form and the coefficients of the step-time model."""

from bisect import bisect_left
from functools import lru_cache

import msgspec
import numpy as np

from legato.core.errors import ConfigError
from legato.core.rows import CPU_ROWS, RowCounts
from legato.scheduler.step_shape import StepShape, chunk_area

ROW_BOUNDS = (16, 64, 256, 1024)
"""Rows at which matrix products change regime: bound by memory below, by arithmetic above."""

NUM_TERMS = 9 + len(ROW_BOUNDS) + 1 + 2
DECODE_TERMS, ROW_TERMS, DRAFT_TERMS = slice(1, 3), slice(9, -2), slice(-2, None)
"""Slices of `StepCosts.vector`: a decode's row and keys, `row_s`, a draft's row and keys."""

EXPERT_TERM, UNPACK_TERM = 7, 8
"""Places of `expert_s` and `unpack_s` in `StepCosts.vector`."""


class StepCosts(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    cache_hash=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """Seconds per unit of work; none is negative, so more work never costs less.

    Attributes:
        step_s: fixed cost of a step, such as reading the weights.
        row_s: cost of a token in the batch, one for each segment between the `ROW_BOUNDS`.
        decode_row_s, decode_context_s: cost of a decode, and of a key that it reads. Recurrent
            states are of a fixed size, so to read and write one is a part of `decode_row_s`, and of
            a prefill chunk's `chunk_s`.
        unpack_s: cost of unpacking quantized weights, for more rows than `rows.most_packed`.
        draft_row_s, draft_context_s: the same for a draft.
        chunk_s: fixed cost of a prefill chunk of any length.
        area_s: cost of a query-key pair in the attention of a prefill chunk.
        context_s: cost of a key that a prefill chunk reads.
        sample_s: cost of a row whose logits are computed.
        expert_s: cost of an expert that computes any row, such as reading its weights.
        rows: row counts that batches are padded to; one token may then cost as much as a hundred.
    """

    step_s: float
    row_s: tuple[float, ...]
    decode_row_s: float = 0.0
    decode_context_s: float = 0.0
    chunk_s: float = 0.0
    area_s: float = 0.0
    context_s: float = 0.0
    sample_s: float = 0.0
    expert_s: float = 0.0
    unpack_s: float = 0.0
    draft_row_s: float = 0.0
    draft_context_s: float = 0.0
    rows: RowCounts = CPU_ROWS

    def __post_init__(self) -> None:
        if len(self.row_s) != len(ROW_BOUNDS) + 1:
            raise ConfigError(f"row_s must have {len(ROW_BOUNDS) + 1} values, got {self.row_s}")
        if min(self.vector) < 0.0:
            raise ConfigError("step costs must not be negative")

    @classmethod
    def from_vector(cls, vector: np.ndarray, rows: RowCounts = CPU_ROWS) -> "StepCosts":
        """Inverse of `vector`: float [NUM_TERMS]."""
        values = map(float, vector)
        step, decode_row, decode_context, chunk, area, context, sample, *others = values
        expert, unpack, *row, draft_row, draft_context = others
        return cls(
            step_s=step,
            row_s=tuple(row),
            decode_row_s=decode_row,
            decode_context_s=decode_context,
            chunk_s=chunk,
            area_s=area,
            context_s=context,
            sample_s=sample,
            expert_s=expert,
            unpack_s=unpack,
            draft_row_s=draft_row,
            draft_context_s=draft_context,
            rows=rows,
        )

    @property
    def vector(self) -> tuple[float, ...]:
        """The costs in the order of `features`."""
        return (
            self.step_s,
            self.decode_row_s,
            self.decode_context_s,
            self.chunk_s,
            self.area_s,
            self.context_s,
            self.sample_s,
            self.expert_s,
            self.unpack_s,
            *self.row_s,
            self.draft_row_s,
            self.draft_context_s,
        )

    def seconds(self, shape: StepShape) -> float:
        """Return the duration of a step of this shape."""
        return (
            self.step_s
            + shape.num_decode_rows * self.decode_row_s
            + shape.decode_context * self.decode_context_s
            + shape.num_prefill_chunks * self.chunk_s
            + shape.prefill_area * self.area_s
            + shape.prefill_context * self.context_s
            + shape.num_samples * self.sample_s
            + shape.num_draft_rows * self.draft_row_s
            + shape.draft_context * self.draft_context_s
            + self.rows_s(shape.num_tokens)
        )

    def rows_s(self, num_tokens: int) -> float:
        """Return the cost of a batch's tokens apart from attention."""
        return _rows_s(self, num_tokens)

    def chunk_cost_s(self, shape: StepShape, start: int, num_tokens: int) -> float:
        """Return the seconds that one more prefill chunk adds to the step."""
        num_rows = shape.num_tokens
        return (
            self.rows_s(num_rows + num_tokens)
            - self.rows_s(num_rows)
            + self.chunk_s
            + self.sample_s
            + self.area_s * chunk_area(start, num_tokens)
            + self.context_s * (start + num_tokens)
        )

    def longest_chunk(self, shape: StepShape, start: int, limit_s: float, cap: int) -> int:
        """Return the longest chunk at `start`, up to `cap`, that fits into `limit_s`; 0 if none.

        The cost grows with the length, so the longest is found by bisection.
        """
        room_s = limit_s - self.seconds(shape)
        if self.chunk_cost_s(shape, start, cap) <= room_s:
            return cap
        # Terms that do not depend on the length are computed once.
        num_rows, rows_s = shape.num_tokens, self.rows_s
        area_s, context_s = self.area_s, self.context_s
        room_s -= self.chunk_s + self.sample_s + context_s * start - rows_s(num_rows)
        return bisect_left(
            range(1, cap + 1),
            True,
            key=lambda n: (
                rows_s(num_rows + n) + area_s * chunk_area(start, n) + context_s * n > room_s
            ),
        )

    def cheapest_chunk(self, shape: StepShape, start: int, num_tokens: int) -> int:
        """Return the chunk's length, or one that ends before padding, or before unpacking, begins.

        The length that computes most of the prompt's tokens per second is returned. It may be the
        whole: costs that do not shrink with the chunk may be most of the step.
        """
        num_rows = shape.num_tokens
        shorter = self.rows.full(num_rows + num_tokens), self.rows.most_packed
        lengths = [n - num_rows for n in shorter if ROW_BOUNDS[0] <= n - num_rows < num_tokens]
        if not lengths:
            return num_tokens
        step_s = self.seconds(shape)
        return max(
            (num_tokens, *lengths),
            key=lambda n: n / (step_s + self.chunk_cost_s(shape, start, n)),
        )


@lru_cache(maxsize=8192)
def _rows_s(costs: StepCosts, num_tokens: int) -> float:
    seconds, low, num_rows = 0.0, 0, costs.rows.padded(num_tokens)
    for bound, slope in zip((*ROW_BOUNDS, num_rows), costs.row_s, strict=True):
        end = min(bound, num_rows)
        seconds += max(0, end - low) * slope
        low = bound
    seconds += costs.unpack_s * costs.rows.are_unpacked(num_tokens)
    return seconds + costs.expert_s * _touched(costs.rows, num_tokens)


@lru_cache(maxsize=8192)
def _touched(rows: RowCounts, num_tokens: int) -> float:
    # Of tokens, not of padded rows: padding needs no experts.
    return 0.0 if rows.experts is None else rows.experts.touched(num_tokens)


def features(shape: StepShape, rows: RowCounts = CPU_ROWS) -> list[float]:
    """Return the amounts that `StepCosts.vector` is multiplied with: [NUM_TERMS]."""
    amounts = [
        1.0,
        float(shape.num_decode_rows),
        float(shape.decode_context),
        float(shape.num_prefill_chunks),
        shape.prefill_area,
        float(shape.prefill_context),
        float(shape.num_samples),
        _touched(rows, shape.num_tokens),
        float(rows.are_unpacked(shape.num_tokens)),
    ]
    num_rows, low = rows.padded(shape.num_tokens), 0
    for bound in (*ROW_BOUNDS, num_rows):
        amounts.append(float(max(0, min(num_rows, bound) - low)))
        low = bound
    return [*amounts, float(shape.num_draft_rows), shape.draft_context]
