"""Attention over parts of the keys, and how the parts are merged.

Softmax over a set of keys can be merged from softmaxes over its parts if each part returns the
logarithm of its denominator (Milakov and Gimelshein, 2018, arXiv:1805.02867; the split over keys of
Flash-Decoding). So a chunk attends to its context and to itself in two calls, both without a mask,
and reads a context in several pieces without copying them together.
"""

import torch

_MOST_SCORES = 2**22
"""Scores that are in memory at a time, where they are explicit."""


def attend_part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, is_causal: bool
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


def attend_explicitly(
    rows: torch.Tensor,
    visible: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    scale: float,
    *,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention with soft caps or sinks, for which PyTorch has no fused operator on CPUs.

    Args:
        rows: queries [T, K, H / K, D].
        visible: keys and values, [1, K, S, D] each.
        mask: added to the scores [T, S]; None for a single row.
        softcap, sinks: as `StepAttention.attend` takes them.

    Returns:
        As `rows`.
    """
    key, value = visible
    parts = []
    num_rows = max(1, _MOST_SCORES // (rows.shape[1] * rows.shape[2] * key.shape[2]))
    for first in range(0, len(rows), num_rows):
        query = rows[first : first + num_rows].permute(1, 2, 0, 3)  # [K, H / K, T, D]
        scores = torch.matmul(query, key[0].unsqueeze(1).mT).float() * scale
        if softcap is not None:
            scores = (scores / softcap).tanh_().mul_(softcap)
        if mask is not None:
            scores += mask[first : first + num_rows]
        if sinks is not None:
            last = sinks.view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, last], dim=-1)
        weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
        parts.append(torch.matmul(weights, value[0].unsqueeze(1)).permute(2, 0, 1, 3))
    return torch.cat(parts)


def merge_parts(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
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
