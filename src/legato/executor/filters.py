"""min_p, top_k and top_p, each as the lowest score that is kept.

A score and not a set of tokens: tokens of equal score stay or go together, so that what is kept
does not depend on the order in which a device happens to sort them.
"""

from collections.abc import Sequence

import numpy as np
import torch

from legato.core.sampling_params import SamplingParams
from legato.executor.draw import to_weights


def is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def lowest_kept(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The lowest score that each row keeps.

    min_p and top_k look at all tokens, top_p at the distribution over those that they leave.

    Args:
        scores: float32 [S, V], from `to_scores`.
        params: S of them.

    Returns:
        float32 [S, 1].
    """
    ascending = _sort(scores)
    cumulative = to_weights(ascending).cumsum(dim=-1)  # [S, V]
    first = _first_allowed(ascending, params)  # [S, 1]
    total = cumulative[:, -1:]
    worse = cumulative.gather(1, (first - 1).clamp_(min=0)).masked_fill_(first == 0, 0)
    top_p = torch.tensor([[p.top_p] for p in params], dtype=torch.float64).to(scores.device)
    wanted = (top_p * (total - worse)).ceil_().to(torch.int64)  # at least 1
    return ascending.gather(1, torch.searchsorted(cumulative, total - wanted, right=True))


def _sort(scores: torch.Tensor) -> torch.Tensor:
    """Each row ascending; on a CPU by NumPy, whose vectorized sort takes a tenth of the time."""
    if scores.device.type == "cpu":
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1))
    return scores.sort(dim=-1).values


def _first_allowed(ascending: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """int64 [S, 1]: index of the lowest score that both min_p and top_k allow."""
    vocab_size = ascending.shape[1]
    min_p = torch.tensor([[p.min_p] for p in params], dtype=torch.float32).to(ascending.device)
    num_kept = [[min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size] for p in params]
    kth_best = ascending.gather(1, vocab_size - torch.tensor(num_kept).to(ascending.device))
    return torch.searchsorted(ascending, torch.maximum(kth_best, min_p.log2_()))
