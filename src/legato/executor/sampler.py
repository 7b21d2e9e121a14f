"""From logits to tokens."""

from collections.abc import Iterator, Sequence

import torch

from legato.executor.adjustments import adjust_logits
from legato.executor.draw import pick, to_scores, to_weights, uniforms
from legato.executor.filters import is_filtered, lowest_kept
from legato.executor.sequence import SamplingRow

_GROUP_ROWS = 16
"""Rows drawn at once: [16, V] fits a CPU's cache, and bounds the memory on any device."""

NO_TOKEN = -1
"""Stands for the next token of a request whose own settings forbid them all."""


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Choose the next token of each row.

    A row's token depends on its own logits and settings only, not on the rows beside it. Greedy
    rows get their most likely token, the lowest id where several tie.

    Args:
        logits: float32 [S, V]; not changed.
        rows: S of them.

    Returns:
        int64 [S], on the device of `logits`; `NO_TOKEN` where a row's settings forbid all.

    Raises:
        ValueError: the best logit of a row is not a finite number, whatever its settings.
    """
    adjusted = adjust_logits(logits, rows)
    tokens = _likeliest(adjusted)
    best = adjusted.gather(1, tokens[:, None])[:, 0]
    barred = _barred(logits, best)
    tokens[barred] = NO_TOKEN
    for group in _groups(rows, without=barred):
        index = torch.tensor(group, device=logits.device)
        tokens[index] = _draw(adjusted[index], best[index], [rows[i] for i in group])
    return tokens


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """int64 [S]; the lowest id of several, and a NaN before anything else."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=1))  # takes a tenth of torch's time
    return logits.argmax(dim=-1)


def _barred(logits: torch.Tensor, best: torch.Tensor) -> list[int]:
    """Rows whose settings leave no token, though the model gives some.

    Args:
        logits: float32 [S, V], as the model gives them.
        best: float32 [S], the greatest of each row once adjusted; a NaN anywhere is also that.
    """
    bad = (~best.isfinite()).nonzero()[:, 0]
    if not len(bad):
        return []
    is_barred = (best[bad] == float("-inf")) & logits[bad].amax(dim=-1).isfinite()
    faulty = bad[~is_barred].tolist()
    if faulty:
        raise ValueError(f"logits of rows {faulty} of {len(best)} are not finite")
    barred: list[int] = bad.tolist()
    return barred


def _groups(rows: Sequence[SamplingRow], without: Sequence[int]) -> Iterator[list[int]]:
    """Indices of the rows to draw; apart, as far as possible, those that filters make dearer."""
    drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy and i not in without]
    drawn.sort(key=lambda i: is_filtered(rows[i].params))
    for start in range(0, len(drawn), _GROUP_ROWS):
        yield drawn[start : start + _GROUP_ROWS]


def _draw(logits: torch.Tensor, best: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """int64 [S]; `logits` are overwritten."""
    params = [row.params for row in rows]
    scores = to_scores(logits, best, params)
    weights = to_weights(scores)
    if any(map(is_filtered, params)):
        weights.masked_fill_(scores < lowest_kept(scores, weights, params), 0)
    return pick(weights, uniforms(rows).to(logits.device))
