"""Log probabilities of chosen and of most likely tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from legato.core.outputs import TokenLogprobs, TokenScores


class Scores(NamedTuple):
    """Of S positions, where they were computed or on the host.

    Attributes:
        chosen: int64 [S], the tokens that stand there.
        logprobs: float32 [S], theirs.
        ranks: int64 [S], theirs, from 1.
        top_ids: int64 [S, N], the most likely tokens.
        top_logprobs: float32 [S, N].
    """

    chosen: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def entries(self, num_top: Sequence[int]) -> list[TokenLogprobs]:
        """S of them, with so many most likely tokens each."""
        columns = (
            self.chosen.tolist(),
            self.logprobs.tolist(),
            self.ranks.tolist(),
            self.top_ids.tolist(),
            self.top_logprobs.tolist(),
            num_top,
        )
        return [
            TokenLogprobs(
                token, logprob, rank, tuple(zip(ids[:count], values[:count], strict=True))
            )
            for token, logprob, rank, ids, values, count in zip(*columns, strict=True)
        ]

    def packed(self) -> TokenScores:
        """The same of a prompt, each position with all of its most likely tokens."""
        token_ids = torch.cat((self.chosen[:, None], self.top_ids), dim=1)  # [S, 1 + N]
        logprobs = torch.cat((self.logprobs[:, None], self.top_logprobs), dim=1)  # [S, 1 + N]
        return TokenScores(
            self.top_ids.shape[1],
            token_ids.to(torch.int32).numpy().tobytes(),
            logprobs.numpy().tobytes(),
            self.ranks.to(torch.int32).numpy().tobytes(),
        )


def score(logits: torch.Tensor, chosen: torch.Tensor, most_top: int) -> Scores:
    """Score tokens, and the most likely ones beside them; nothing waits for a device.

    Args:
        logits: float32 [S, V], as the model made them; not changed.
        chosen: int64 [S].
        most_top: most likely tokens that any position wants.
    """
    logprobs = logits.log_softmax(dim=-1)
    places = chosen[:, None]
    ranks = 1 + (logits > logits.gather(1, places)).sum(dim=-1)
    top = logprobs.topk(min(most_top, logits.shape[1]))
    return Scores(chosen, logprobs.gather(1, places)[:, 0], ranks, top.indices, top.values)


def compute_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """`score`, with `num_top` most likely tokens for each of S positions."""
    return score(logits, chosen, max(num_top, default=0)).entries(num_top)
