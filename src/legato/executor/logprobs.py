"""Log probabilities of chosen and of most likely tokens."""

from collections.abc import Sequence

import torch

from legato.core.outputs import TokenLogprobs


def compute_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Score the tokens that stand at S positions, and the most likely ones beside them.

    Args:
        logits: float32 [S, V], as the model made them; not changed.
        chosen: int64 [S].
        num_top: S counts of most likely tokens to return.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = chosen[:, None]
    ranks = 1 + (logits > logits.gather(1, chosen)).sum(dim=-1)
    top = logprobs.topk(min(max(num_top, default=0), logits.shape[1]))
    columns = (
        chosen[:, 0].tolist(),
        logprobs.gather(1, chosen)[:, 0].tolist(),
        ranks.tolist(),
        top.indices.tolist(),
        top.values.tolist(),
        num_top,
    )
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(ids[:count], values[:count], strict=True)))
        for token_id, logprob, rank, ids, values, count in zip(*columns, strict=True)
    ]
