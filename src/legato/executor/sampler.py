"""Samples tokens from logits."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from legato.core.sampling_params import Filters
from legato.executor.adjustments import LogitAdjuster, asks_for_change
from legato.executor.draw import pick, to_scores, to_weights, uniform_numbers
from legato.executor.sequence import SamplingRow

_GROUP_ROWS = 16
"""Rows adjusted and sampled at once: [16, V] fits a CPU's cache."""

_PLAIN = (True, False)
"""The kind of a greedy row without adjustments."""

_ON_HOST = LogitAdjuster()

NO_TOKEN = -1
"""Stands for the next token of a request whose own settings forbid all tokens."""

_LIKELY = (-12.0, -24.0, -math.inf)
"""Lower limits of score, tried in turn. The first, which a few hundred tokens of a vocabulary pass,
is enough for almost every row."""


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Sample the next token of each row.

    A row's token depends on its own logits and settings only, not on the rows beside it. Greedy
    rows get their most likely token, and the lowest id in a tie.

    Args:
        logits: float32 [S, V], on the CPU; not changed.
        rows: S rows.

    Returns:
        int64 [S]; `NO_TOKEN` where a row's settings forbid all tokens.

    Raises:
        ValueError: a row's best logit is not finite before any adjustment.
    """
    tokens = _likeliest(logits)
    best = _best(logits, tokens)
    _require_finite(best)
    for group in _groups(rows):
        index = torch.tensor(group, device=logits.device)
        # On a CPU, this takes a third of the time of indexing by a tensor.
        own = logits.index_select(0, index)
        tokens[index] = _choose(own, best[index], [rows[i] for i in group])
    return tokens


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return int64 [S]: the lowest id in a tie, and a NaN before any number."""
    return torch.from_numpy(logits.numpy().argmax(axis=1))  # takes a tenth of torch's time


def _best(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return float32 [S], the logits of the likeliest tokens."""
    return logits.gather(1, tokens[:, None])[:, 0]


def _require_finite(best: torch.Tensor) -> None:
    faulty = (~best.isfinite()).nonzero()[:, 0].tolist()
    if faulty:
        raise ValueError(f"logits of rows {faulty} of {len(best)} are not finite")


def _groups(rows: Sequence[SamplingRow]) -> Iterator[list[int]]:
    """Yield indices of rows of one kind, without the rows that take their likeliest token as is.

    Rows with filters, which cost more, are adjacent as far as possible.
    """
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for i, row in enumerate(rows):
        kind = row.params.is_greedy, asks_for_change(row)
        if kind != _PLAIN:
            kinds.setdefault(kind, []).append(i)
    for indices in kinds.values():
        indices.sort(key=lambda i: is_filtered(rows[i].params.draw.filters))
        for start in range(0, len(indices), _GROUP_ROWS):
            yield indices[start : start + _GROUP_ROWS]


def _choose(logits: torch.Tensor, best: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Return tokens int64 [N] of rows of one kind; overwrites `logits`, whose maxima are `best`."""
    if not asks_for_change(rows[0]):
        return _draw(logits, best, rows)
    _ON_HOST.adjust(logits, rows)
    tokens = _likeliest(logits)
    best = _best(logits, tokens)
    barred = (best == float("-inf")).nonzero()[:, 0]
    logits[barred] = best[barred] = 0.0  # the token drawn from them is not used
    _require_finite(best)
    if not rows[0].params.is_greedy:
        tokens = _draw(logits, best, rows)
    tokens[barred] = NO_TOKEN
    return tokens


def _draw(logits: torch.Tensor, best: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Sample int64 [S]; overwrites `logits`."""
    temperatures, filters, seeds = zip(*(row.params.draw for row in rows), strict=True)
    assert None not in seeds, "the front end resolves seeds"
    scores = to_scores(logits, best, temperatures)
    weights = to_weights(scores)
    if any(map(is_filtered, filters)):
        weights.masked_fill_(scores < lowest_kept(scores, weights, filters), 0)
    lengths = np.array([row.num_output_tokens for row in rows], dtype=np.int64)
    uniforms = uniform_numbers(np.array(seeds, dtype=np.int64), lengths)
    return pick(weights, torch.from_numpy(uniforms).to(logits.device))


def is_filtered(filters: Filters) -> bool:
    """Whether a filter may exclude a token."""
    top_p, top_k, min_p = filters
    return top_k > 0 or top_p < 1.0 or min_p > 0.0


def lowest_kept(
    scores: torch.Tensor, weights: torch.Tensor, filters: Sequence[Filters]
) -> torch.Tensor:
    """Return the lowest score that each row keeps by its min_p, top_k and top_p.

    The result is a score, not a set of tokens: tokens of equal score stay or go together, so the
    kept tokens do not depend on the order in which a device happens to sort ties. min_p and top_k
    look at all tokens, top_p at the distribution over the tokens that they keep.

    Args:
        scores: float32 [S, V], from `to_scores`.
        weights: int64 [S, V], of the same tokens, from `to_weights`.
        filters: S entries.

    Returns:
        float32 [S, 1].
    """
    rows = zip(scores.numpy(), weights.numpy(), filters, strict=True)
    return torch.tensor([_lowest_of_row(*row) for row in rows], dtype=torch.float32)[:, None]


def _lowest_of_row(
    scores: npt.NDArray[np.float32], weights: npt.NDArray[np.int64], filters: Filters
) -> float:
    total = int(weights.sum())
    for limit in _LIKELY:
        likely = np.flatnonzero(scores >= limit)
        likely = likely[scores[likely].argsort()]
        lowest = _lowest_of_likely(scores[likely], weights[likely], total, filters)
        if lowest is not None:
            return lowest
    raise AssertionError("nothing is missing from all tokens")


def _lowest_of_likely(
    ascending: npt.NDArray[np.float32], weights: npt.NDArray[np.int64], total: int, filters: Filters
) -> float | None:
    """Return the lowest kept score; None if it may belong to a token not in `ascending`.

    Args:
        total: weight of all tokens.
    """
    top_p, top_k, min_p = filters
    unlikely = total - int(weights.sum())
    cumulative = unlikely + weights.cumsum()
    worse = 0
    if top_k > 0 or min_p > 0.0:
        kth_best = ascending[-top_k] if 0 < top_k <= len(ascending) else -np.inf
        first = int(np.searchsorted(ascending, max(kth_best, _log2(min_p))))
        if first == 0 and unlikely:
            return None
        worse = int(cumulative[first - 1]) if first else 0
    excess = total - math.ceil(top_p * (total - worse))
    if unlikely > excess:
        return None
    return float(ascending[np.searchsorted(cumulative, excess, side="right")])


def _log2(value: float) -> float:
    with np.errstate(divide="ignore"):
        return float(np.log2(np.float32(value)))
