"""Fits step costs to measured steps by weighted non-negative least squares, kept as sums.

The sums (a Gram matrix) forget: each new step fades the earlier ones by a constant factor, so the
fit follows a machine whose speed drifts. A calibration's sums are kept apart and do not fade, so
costs that recent traffic does not measure stay known.

All sums are in seconds at the machine's present speed: `rescale` restates the earlier steps when
the speed changes. The calibration is restated too, and each solution corrects that factor. A cost
keeps its last value once the sums of its steps have almost faded.

A segment of the row costs may begin at more tokens than any step has had. It then takes the slope
of the segment before it. Least squares alone would make its slope zero, and a step of 1,024 tokens
would cost the same as one of 256.
"""

from collections.abc import Sequence

import numpy as np

from legato.core.rows import CPU_ROWS, RowCounts
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
"""Weight that pulls a cost to its last value, as a share of its largest sum of squares so far:
negligible beside any step, and decisive once its steps have faded."""
_RIDGE = 1e-6
"""Weight that pulls a cost to zero, as a share of its sum of squares: makes every fit solvable."""
_RIDGES = _RIDGE * np.eye(NUM_TERMS)
_OUTLIER = 0.2
"""Relative residual above which a measured step counts less, in inverse proportion."""
_ROBUST_ROUNDS = 4
_CONTINUITY = 1e-10
"""Weight that pulls a segment's slope to that of the segment before it, as a share of the latter's
sum of squares: any step that reaches into the segment outweighs it."""

_DIFFERENCES = np.diff(np.eye(NUM_TERMS)[ROW_TERMS], axis=0)
"""Differences between the slopes of adjacent segments: [segments - 1, NUM_TERMS]."""

_LIKENESS = 1e-4
"""Weight that pulls a draft's costs to a decode's, as a share of the decodes' sums of squares. With
less, interrupted first drafts would look expensive; a few more drafts outweigh this much."""
_LIKE_DECODES = np.eye(NUM_TERMS)[DRAFT_TERMS] - np.eye(NUM_TERMS)[DECODE_TERMS]

DISTURBED = 1.3
"""Ratio of measured to predicted seconds above which another program must have had the machine."""

MOST_DISTURBED = 0.1
"""Largest share of disturbed steps. On a machine with nothing else to do it is 0.05 or less."""

_TOLERANCE = 1e-10
"""Relative gradient below which a zero coefficient stays zero."""


class CostFit:
    """Running sums of squares over relative errors.

    Args:
        prior: steps measured by a calibration; may be empty.
        rows: the row counts that batches are padded to.
    """

    def __init__(self, prior: Sequence[MeasuredStep] = (), rows: RowCounts = CPU_ROWS) -> None:
        self._rows = rows
        self._gram = np.zeros((NUM_TERMS, NUM_TERMS))
        self._target = np.zeros(NUM_TERMS)
        self._prior_gram = np.zeros((NUM_TERMS, NUM_TERMS))
        self._prior_target = np.zeros(NUM_TERMS)
        self._prior_amounts: np.ndarray | None = None  # amounts of the mean calibration step
        self._slowness = 1.0  # present seconds per second of the calibration
        self._solved: np.ndarray | None = None  # last solution, at the present speed
        self._most_known = np.zeros(NUM_TERMS)  # largest value so far of each sum of squares
        if prior:
            gram, target = _robust_sums(prior, rows)
            self._prior_gram, self._prior_target = _PRIOR_WEIGHT * gram, _PRIOR_WEIGHT * target
            costs = _solve(gram, target)
            self._prior_amounts = costs @ gram / (costs @ gram @ costs)

    def add(self, shape: StepShape, seconds: float, weight: float) -> None:
        """Add one step and fade the earlier ones."""
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
        """Return the costs that fit best."""
        gram = self._gram + self._prior_gram / self._slowness**2
        target = self._target + self._prior_target / self._slowness
        if self._solved is not None:
            remembered = _REMEMBERED * self._most_known
            gram += np.diag(remembered)
            target += (1.0 + _RIDGE) * remembered * self._solved
        self._solved = _solve(gram, target, self._solved)
        self._most_known = np.maximum(self._most_known, self._gram.diagonal())
        amounts = self._prior_amounts
        self._slowness = 1.0 if amounts is None else float(amounts @ self._solved)
        return StepCosts.from_vector(self._solved, self._rows)


def fit(steps: Sequence[MeasuredStep], rows: RowCounts = CPU_ROWS) -> StepCosts:
    """Return the costs that fit the steps best, in any order; outliers count less."""
    return StepCosts.from_vector(_solve(*_robust_sums(steps, rows)), rows)


def disturbed(steps: Sequence[MeasuredStep], costs: StepCosts) -> float:
    """Return the share of steps that took longer than the machine alone explains."""
    return float(np.mean([seconds > DISTURBED * costs.seconds(shape) for shape, seconds in steps]))


def relative_errors(steps: Sequence[MeasuredStep], costs: StepCosts) -> np.ndarray:
    """Return each step's absolute relative prediction error: float [N]."""
    return np.array([abs(seconds / costs.seconds(shape) - 1.0) for shape, seconds in steps])


def leverage(
    steps: Sequence[MeasuredStep], shapes: Sequence[StepShape], rows: RowCounts = CPU_ROWS
) -> float:
    """Return by which factor errors of the steps grow in the prediction of a shape, at most.

    Steps that tell little of a cost can be fitted well by any value of it. A shape that depends on
    it is then predicted by chance, which no error of the fit shows.
    """
    gram = _robust_sums(steps, rows)[0]
    normal, scale = _normal(gram)
    amounts = np.array([features(shape, rows) for shape in shapes]) / scale
    variances = np.einsum("ij,ij->i", amounts, np.linalg.solve(normal, amounts.T).T)
    costs = fit(steps, rows)
    predicted_s = np.maximum([costs.seconds(shape) for shape in shapes], 1e-9)
    return float((np.sqrt(variances) / predicted_s).max())


def outlier_weight(residual: float) -> float:
    """Return Huber's weight: 1 up to a relative residual of `_OUTLIER`, less beyond it."""
    return min(1.0, _OUTLIER / max(abs(residual), 1e-9))


def _robust_sums(steps: Sequence[MeasuredStep], rows: RowCounts) -> tuple[np.ndarray, np.ndarray]:
    """Return Gram matrix and target by iteratively reweighted least squares."""
    # Divided by the measured seconds, so that errors are relative and each row's target is 1.
    amounts = np.array([[x / seconds for x in features(shape, rows)] for shape, seconds in steps])
    weights = np.ones(len(amounts))
    for _ in range(_ROBUST_ROUNDS):
        costs = _solve((amounts.T * weights) @ amounts, amounts.T @ weights)
        predicted = np.maximum(amounts @ costs, 1e-9)
        weights = np.array([outlier_weight(r) for r in 1.0 / predicted - 1.0])
    return (amounts.T * weights) @ amounts, amounts.T @ weights


def _solve(gram: np.ndarray, target: np.ndarray, near: np.ndarray | None = None) -> np.ndarray:
    """Solve non-negative least squares: [NUM_TERMS]. Args: near: a similar solution."""
    normal, scale = _normal(gram)
    near = None if near is None else near * scale
    return np.asarray(solve_nonnegative(normal, target / scale, near) / scale)


def _normal(gram: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the regular matrix of a Gram matrix's problem, and the scale of each coefficient."""
    gram = gram + _continuity(gram)
    scale = np.sqrt(np.diag(gram))
    scale[scale == 0.0] = 1.0
    return gram / np.multiply.outer(scale, scale) + _RIDGES, scale


def _continuity(gram: np.ndarray) -> np.ndarray:
    """Return weighted squares of cost differences, to be added to a Gram matrix.

    The differences are those between the slopes of adjacent segments, and between drafts and
    decodes.
    """
    known = np.maximum.accumulate(gram.diagonal()[ROW_TERMS])[:-1]
    slopes = (_DIFFERENCES.T * (_CONTINUITY * known)) @ _DIFFERENCES
    decodes = gram.diagonal()[DECODE_TERMS]
    drafts = (_LIKE_DECODES.T * (_LIKENESS * decodes)) @ _LIKE_DECODES
    return np.asarray(slopes + drafts)


def solve_nonnegative(
    gram: np.ndarray, target: np.ndarray, near: np.ndarray | None = None
) -> np.ndarray:
    """Return the x >= 0 [N] that minimizes |Ax - b| (Bro and de Jong, 1997).

    It takes sums, not rows, unlike SciPy's, which would take long to import.

    Args:
        gram: A'A [N, N], positive definite.
        target: A'b [N].
        near: the solution of a similar problem. If the same coefficients are zero in both, the
            search takes one round.
    """
    solution = np.zeros(len(target)) if near is None else near
    free = solution > 0.0
    if near is not None:
        solution = _descend(gram, target, solution, free)
    enough = _TOLERANCE * np.abs(target).max(initial=0.0)
    for _ in range(3 * len(target)):  # each is freed once or twice, but rounding could cycle
        gradient = np.where(free, -np.inf, target - gram @ solution)
        steepest = int(gradient.argmax())
        if gradient[steepest] <= enough:
            break
        free[steepest] = True
        solution = _descend(gram, target, solution, free)
    return solution


def _descend(
    gram: np.ndarray, target: np.ndarray, solution: np.ndarray, free: np.ndarray
) -> np.ndarray:
    """Solve for the free coefficients; reset coefficients to zero that would become negative."""
    while free.any():
        wanted = np.zeros(len(target))
        wanted[free] = np.linalg.solve(gram[free][:, free], target[free])
        too_low = free & (wanted <= 0.0)
        if not too_low.any():
            return wanted
        share = (solution[too_low] / (solution[too_low] - wanted[too_low])).min()
        solution = solution + share * (wanted - solution)
        free &= solution > _TOLERANCE * solution.max()
        solution[~free] = 0.0
    return solution
