"""Non-negative least squares from sums: no rows are kept, and SciPy takes long to import."""

import numpy as np

_TOLERANCE = 1e-10
"""Relative gradient below which a coefficient that is zero would not grow."""


def solve_nonnegative(
    gram: np.ndarray, target: np.ndarray, near: np.ndarray | None = None
) -> np.ndarray:
    """The x >= 0 [N] that makes |Ax - b| least (Bro and de Jong, 1997).

    Args:
        gram: A'A [N, N], positive definite.
        target: A'b [N].
        near: the solution of a problem that is nearly the same: where the same coefficients are
            zero in both, it is found at once.
    """
    solution = np.zeros(len(target)) if near is None else near
    free = solution > 0.0
    if near is not None:
        solution = _descend(gram, target, solution, free)
    enough = _TOLERANCE * np.abs(target).max(initial=0.0)
    for _ in range(3 * len(target)):  # each is freed once or twice; rounding might go in circles
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
    """Solve for the free coefficients; those that would become negative are bound to zero again."""
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
