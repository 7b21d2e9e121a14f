"""How a model sees attention: packed rows go in, packed rows come out.

Shapes here and in the layers use one legend: T packed tokens of the step (all requests, no
padding), H query heads, K key/value heads, D head size, E hidden size, V vocabulary.
"""

from typing import Protocol

import torch


class StepAttention(Protocol):
    """Attention over one step's packed batch, bound to the KV cache and its block tables."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Write the new keys and values to the cache, then attend causally within each request.

        Args:
            layer: index of the decoder layer, which selects the cache.
            query: [T, H, D], rotary embedding applied.
            key: [T, K, D], likewise.
            value: [T, K, D].
            scale: factor on the query-key products.
            sliding_window: a query at position p sees keys at (p - sliding_window, p]; None sees
                all keys at [0, p].

        Returns:
            [T, H, D] in the query's dtype.
        """
        ...
