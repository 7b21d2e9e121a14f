"""What one request has in the cache, as tensors that the attention operators can read."""

import torch

MIN_RUN_IN_PLACE = 128
"""Tokens from which a call of its own is cheaper than copying a run."""

KeysValues = tuple[torch.Tensor, torch.Tensor]  # each [1, K, S, D]


class CachedContext:
    """Keys and values of some of a request's tokens, in every layer.

    The views of all layers are made together, once a step: making them anew in each layer took
    longer than attending did.

    Args:
        cache: [L, 2, N, K, D], keys and values of N slots in L layers.
        runs: slots [start, end) that hold the tokens, in token order.
    """

    def __init__(self, cache: torch.Tensor, runs: list[tuple[int, int]]) -> None:
        views = [_views(cache, start, end) for start, end in runs]
        is_long = [len(runs) == 1 or end - start >= MIN_RUN_IN_PLACE for start, end in runs]
        self._runs = views
        self._long = [view for view, long in zip(views, is_long, strict=True) if long]
        self._short = [view for view, long in zip(views, is_long, strict=True) if not long]

    def pieces(self, layer: int) -> list[KeysValues]:
        """All tokens, in any order: long runs where they lie, the short ones copied together."""
        pieces = [(views[2 * layer], views[2 * layer + 1]) for views in self._long]
        return [*pieces, _join(self._short, layer)] if self._short else pieces

    def in_order(self, layer: int) -> KeysValues:
        """All tokens in one piece, in token order."""
        return _join(self._runs, layer)


def _views(cache: torch.Tensor, start: int, end: int) -> tuple[torch.Tensor, ...]:
    """[1, K, S, D] each: keys and values of the first layer, of the second, and so on."""
    return cache[:, :, start:end].transpose(2, 3).flatten(0, 1).unsqueeze(1).unbind(0)


def _join(runs: list[tuple[torch.Tensor, ...]], layer: int) -> KeysValues:
    if len(runs) == 1:
        return runs[0][2 * layer], runs[0][2 * layer + 1]
    keys, values = zip(*((views[2 * layer], views[2 * layer + 1]) for views in runs), strict=True)
    return torch.cat(keys, dim=2), torch.cat(values, dim=2)
