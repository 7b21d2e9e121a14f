"""Attention over parts of the keys, and how the parts are merged.

Softmax over a set of keys can be merged from softmaxes over its parts if each part returns the
logarithm of its denominator (Milakov and Gimelshein, 2018, arXiv:1805.02867; the split over keys of
Flash-Decoding). So a chunk attends to its context and to itself in two calls, both without a mask,
and reads a context in several pieces without copying them together.
"""

import torch


def attend_part(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and the log of the softmax denominator; the only mask is the causal one.

    Args:
        query: [1, H, T, D].
        key: [1, K, S, D] with H a multiple of K; S = T where `is_causal`.
        value: [1, K, S, D].

    Returns:
        out [1, H, T, D] in the query's dtype, lse [1, H, T] in float32.
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, scale=scale
    )
    return out, lse


def merge_parts(
    parts: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Merge attention over disjoint sets of keys; shapes as `attend_part` returns them."""
    out, lse = parts[0]
    if len(parts) == 1:
        return out
    merged = out.float()
    for other, other_lse in parts[1:]:
        weight = torch.sigmoid(other_lse - lse).unsqueeze(-1)
        merged = torch.lerp(merged, other.float(), weight)
        lse = torch.logaddexp(lse, other_lse)
    return merged.to(out.dtype)
