"""Non-negative least squares from sums, without the rows. SciPy would take long to import."""

import numpy as np

_TOLERANCE = 1e-10
"""Relative gradient below which a zero coefficient stays zero."""


def solve_nonnegative(
    gram: np.ndarray, target: np.ndarray, near: np.ndarray | None = None
) -> np.ndarray:
    """Return the x >= 0 [N] that minimizes |Ax - b| (Bro and de Jong, 1997).

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
        wanted[free] = np.linalg.solve(gram[np.ix_(free, free)], target[free])
        too_low = free & (wanted <= 0.0)
        if not too_low.any():
            return wanted
        share = (solution[too_low] / (solution[too_low] - wanted[too_low])).min()
        solution = solution + share * (wanted - solution)
        free &= solution > _TOLERANCE * solution.max()
        solution[~free] = 0.0
    return solution
