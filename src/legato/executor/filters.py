"""min_p, top_k and top_p, each as the lowest score that it keeps.

The result is a score, not a set of tokens: tokens of equal score stay or go together, so the kept
tokens do not depend on the order in which a device happens to sort ties.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from legato.core.sampling_params import SamplingParams

_LIKELY = (-12.0, -24.0, -math.inf)
"""Lower limits of score, tried in turn. The first, which a few hundred tokens of a vocabulary pass,
is enough for almost every row."""


def is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def lowest_kept(
    scores: torch.Tensor, weights: torch.Tensor, params: Sequence[SamplingParams]
) -> torch.Tensor:
    """Return the lowest score that each row keeps.

    min_p and top_k look at all tokens, top_p at the distribution over the tokens that they keep.

    Args:
        scores: float32 [S, V], from `to_scores`.
        weights: int64 [S, V], of the same tokens, from `to_weights`.
        params: S entries.

    Returns:
        float32 [S, 1].
    """
    rows = zip(scores.numpy(), weights.numpy(), params, strict=True)
    return torch.tensor([_lowest_of_row(*row) for row in rows], dtype=torch.float32)[:, None]


def _lowest_of_row(
    scores: npt.NDArray[np.float32], weights: npt.NDArray[np.int64], params: SamplingParams
) -> float:
    total = int(weights.sum())
    for limit in _LIKELY:
        likely = np.flatnonzero(scores >= limit)
        likely = likely[scores[likely].argsort()]
        lowest = _lowest_of_likely(scores[likely], weights[likely], total, params)
        if lowest is not None:
            return lowest
    raise AssertionError("nothing is missing from all tokens")


def _lowest_of_likely(
    ascending: npt.NDArray[np.float32],
    weights: npt.NDArray[np.int64],
    total: int,
    params: SamplingParams,
) -> float | None:
    """Return the lowest kept score; None if it may belong to a token not in `ascending`.

    Args:
        total: weight of all tokens.
    """
    unlikely = total - int(weights.sum())
    cumulative = unlikely + weights.cumsum()
    worse = 0
    if params.top_k > 0 or params.min_p > 0.0:
        kth_best = ascending[-params.top_k] if 0 < params.top_k <= len(ascending) else -np.inf
        first = int(np.searchsorted(ascending, max(kth_best, _log2(params.min_p))))
        if first == 0 and unlikely:
            return None
        worse = int(cumulative[first - 1]) if first else 0
    excess = total - math.ceil(params.top_p * (total - worse))
    if unlikely > excess:
        return None
    return float(ascending[np.searchsorted(cumulative, excess, side="right")])


def _log2(value: float) -> float:
    with np.errstate(divide="ignore"):
        return float(np.log2(np.float32(value)))
