"""Fits step costs to measured steps: weighted non-negative least squares, kept as its sums.

The sums (a Gram matrix) forget: each new step fades the earlier ones by a constant factor, so the
fit follows a machine whose speed drifts. What a calibration measured is kept beside them and does
not fade, so that costs which the traffic of the last minutes says nothing about stay known.

All sums are of seconds at the machine's present speed: `rescale` restates the earlier steps when
that changes. A calibration is restated too, and each solution corrects by how much. A cost that no
step has had for so long that its sums have all but faded stays as it was.

No step may have held as many tokens as a segment of the row costs begins at. Such a segment goes on
as the one before it: zero, which least squares would make of it, would let a step of 1,024 tokens
cost what one of 256 does.
"""

from collections.abc import Sequence

import numpy as np

from legato.core.rows import CPU_ROWS, RowCounts
from legato.scheduler.nonnegative import solve_nonnegative
from legato.scheduler.step_costs import (
    DECODE_TERMS,
    DRAFT_TERMS,
    NUM_TERMS,
    ROW_TERMS,
    StepCosts,
    features,
)
from legato.scheduler.step_shape import StepShape

MeasuredStep = tuple[StepShape, float]  # seconds

_FORGETTING = 0.998
"""A step counts half as much after 350 others."""
_PRIOR_WEIGHT = 0.25
_REMEMBERED = 1e-12
"""Weight of a cost being what it was, of the most that was ever known of it: too little to matter
beside any step, and enough to be left when its steps have faded."""
_RIDGE = 1e-6
"""Weight, of what is known of each cost, of its being zero: it makes every fit solvable."""
_OUTLIER = 0.2
"""Relative residual from which on a measured step counts less, in inverse proportion."""
_ROBUST_ROUNDS = 4
_CONTINUITY = 1e-10
"""Weight of a segment's slope being that of the one before it, of what is known of the latter: so
little that any step that reaches into the segment outweighs it."""

_DIFFERENCES = np.diff(np.eye(NUM_TERMS)[ROW_TERMS], axis=0)
"""Between the slopes of adjacent segments: [segments - 1, NUM_TERMS]."""

_LIKENESS = 1e-4
"""Weight of a draft costing what a decode does, of what is known of decodes: so much that the first
drafts, if they are interrupted, do not pass for dear, and so little that a few more outweigh it."""
_LIKE_DECODES = np.eye(NUM_TERMS)[DRAFT_TERMS] - np.eye(NUM_TERMS)[DECODE_TERMS]

DISTURBED = 1.3
"""Measured over predicted seconds from which on something else must have had the machine."""

MOST_DISTURBED = 0.1
"""Of a machine's steps; where it has nothing else to do, it is one in twenty or less."""


class CostFit:
    """Running sums of squares over relative errors.

    Args:
        prior: steps measured by a calibration; may be empty.
        rows: what their batches are padded to.
    """

    def __init__(self, prior: Sequence[MeasuredStep] = (), rows: RowCounts = CPU_ROWS) -> None:
        self._rows = rows
        self._gram = np.zeros((NUM_TERMS, NUM_TERMS))
        self._target = np.zeros(NUM_TERMS)
        self._prior_gram = np.zeros((NUM_TERMS, NUM_TERMS))
        self._prior_target = np.zeros(NUM_TERMS)
        self._prior_amounts: np.ndarray | None = None  # of an average step of the calibration
        self._slowness = 1.0  # seconds of a step at present, for each second in the calibration
        self._solved: np.ndarray | None = None  # the last time, at the present speed
        self._most_known = np.zeros(NUM_TERMS)  # the largest that each sum of squares has been
        if prior:
            gram, target = _robust_sums(prior, rows)
            self._prior_gram, self._prior_target = _PRIOR_WEIGHT * gram, _PRIOR_WEIGHT * target
            costs = _solve(gram, target)
            self._prior_amounts = costs @ gram / (costs @ gram @ costs)

    def add(self, shape: StepShape, seconds: float, weight: float) -> None:
        """Take in one step, forgetting a little of those before it."""
        row = np.array(features(shape, self._rows)) / seconds
        self._gram *= _FORGETTING
        self._gram += weight * np.multiply.outer(row, row)
        self._target *= _FORGETTING
        self._target += weight * row

    def rescale(self, factor: float) -> None:
        """Restate all steps as if each had taken `factor` times as long."""
        self._gram /= factor**2
        self._target /= factor
        self._most_known /= factor**2
        if self._solved is not None:
            self._solved *= factor
        self._slowness *= factor

    def solve(self) -> StepCosts:
        """The costs that fit best."""
        gram = self._gram + self._prior_gram / self._slowness**2
        target = self._target + self._prior_target / self._slowness
        if self._solved is not None:
            remembered = _REMEMBERED * self._most_known
            gram += np.diag(remembered)
            target += (1.0 + _RIDGE) * remembered * self._solved
        self._solved = _solve(gram, target, self._solved)
        self._most_known = np.maximum(self._most_known, np.diag(self._gram))
        amounts = self._prior_amounts
        self._slowness = 1.0 if amounts is None else float(amounts @ self._solved)
        return StepCosts.from_vector(self._solved, self._rows)


def fit(steps: Sequence[MeasuredStep], rows: RowCounts = CPU_ROWS) -> StepCosts:
    """The costs that fit measured steps best, whatever their order; outliers count less."""
    return StepCosts.from_vector(_solve(*_robust_sums(steps, rows)), rows)


def disturbed(steps: Sequence[MeasuredStep], costs: StepCosts) -> float:
    """Share of steps that were longer than the machine alone explains."""
    return float(np.mean([seconds > DISTURBED * costs.seconds(shape) for shape, seconds in steps]))


def relative_errors(steps: Sequence[MeasuredStep], costs: StepCosts) -> np.ndarray:
    """How far measured steps are off what is predicted of them: float [N], none negative."""
    return np.array([abs(seconds / costs.seconds(shape) - 1.0) for shape, seconds in steps])


def outlier_weight(residual: float) -> float:
    """Huber's: 1 for an ordinary relative residual, less beyond."""
    return min(1.0, _OUTLIER / max(abs(residual), 1e-9))


def _robust_sums(steps: Sequence[MeasuredStep], rows: RowCounts) -> tuple[np.ndarray, np.ndarray]:
    """Gram matrix and target by iteratively reweighted least squares."""
    # Divided by the measured seconds, so that errors are relative and each row's target is 1.
    amounts = np.array([[x / seconds for x in features(shape, rows)] for shape, seconds in steps])
    weights = np.ones(len(amounts))
    for _ in range(_ROBUST_ROUNDS):
        costs = _solve((amounts.T * weights) @ amounts, amounts.T @ weights)
        predicted = np.maximum(amounts @ costs, 1e-9)
        weights = np.array([outlier_weight(r) for r in 1.0 / predicted - 1.0])
    return (amounts.T * weights) @ amounts, amounts.T @ weights


def _solve(gram: np.ndarray, target: np.ndarray, near: np.ndarray | None = None) -> np.ndarray:
    """Non-negative least squares from its sums: [NUM_TERMS]. Args: near: a solution like it."""
    gram = gram + _continuity(gram)
    scale = np.sqrt(np.diag(gram))
    scale[scale == 0.0] = 1.0
    normal = gram / np.outer(scale, scale) + _RIDGE * np.eye(NUM_TERMS)
    near = None if near is None else near * scale
    return solve_nonnegative(normal, target / scale, near) / scale


def _continuity(gram: np.ndarray) -> np.ndarray:
    """Sums of squares over the differences between slopes of adjacent segments, and between drafts
    and decodes: as `gram`."""
    known = np.maximum.accumulate(np.diag(gram)[ROW_TERMS])[:-1]
    slopes = (_DIFFERENCES.T * (_CONTINUITY * known)) @ _DIFFERENCES
    decodes = np.diag(gram)[DECODE_TERMS]
    drafts = (_LIKE_DECODES.T * (_LIKENESS * decodes)) @ _LIKE_DECODES
    return np.asarray(slopes + drafts)
