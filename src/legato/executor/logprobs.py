"""Log probabilities of chosen tokens and of the most likely ones."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from legato.core.outputs import TokenLogprobs, TokenScores


class Scores(NamedTuple):
    """Log probabilities at S positions, on the model's device or on the host.

    Attributes:
        chosen: int64 [S], the token at each position.
        logprobs: float32 [S], of the chosen tokens.
        ranks: int64 [S], of the chosen tokens, from 1.
        top_ids: int64 [S, N], the most likely tokens, or listed ones; one may be there twice.
        top_logprobs: float32 [S, N].
    """

    chosen: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def entries(self, num_top: Sequence[int]) -> list[TokenLogprobs]:
        """Return S entries, entry i with `num_top[i]` most likely tokens."""
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
                token,
                logprob,
                rank,
                tuple(dict(zip(ids[:count], values[:count], strict=True)).items()),
            )
            for token, logprob, rank, ids, values, count in zip(*columns, strict=True)
        ]

    def packed(self) -> TokenScores:
        """Return the scores of a prompt, each position with all N most likely tokens."""
        token_ids = torch.cat((self.chosen[:, None], self.top_ids), dim=1)  # [S, 1 + N]
        logprobs = torch.cat((self.logprobs[:, None], self.top_logprobs), dim=1)  # [S, 1 + N]
        return TokenScores(
            self.top_ids.shape[1],
            token_ids.to(torch.int32).numpy().tobytes(),
            logprobs.numpy().tobytes(),
            self.ranks.to(torch.int32).numpy().tobytes(),
        )


def score(
    logits: torch.Tensor, chosen: torch.Tensor, most_top: int, listed: torch.Tensor | None = None
) -> Scores:
    """Score chosen and most likely tokens, without waiting for a device.

    Args:
        logits: float32 [S, V], unadjusted; not changed.
        chosen: int64 [S].
        most_top: most likely tokens to return for each position.
        listed: int64 [L], tokens to return in their place, with the chosen one: N is L + 1.
    """
    logprobs = logits.log_softmax(dim=-1)
    places = chosen[:, None]
    ranks = 1 + (logits > logits.gather(1, places)).sum(dim=-1)
    of_chosen = logprobs.gather(1, places)[:, 0]
    if listed is not None:
        ids = torch.cat((listed.expand(len(chosen), -1), places), dim=1)
        best = logprobs.gather(1, ids).sort(dim=1, descending=True, stable=True)
        return Scores(chosen, of_chosen, ranks, ids.gather(1, best.indices), best.values)
    top = logprobs.topk(min(most_top, logits.shape[1]))
    return Scores(chosen, of_chosen, ranks, top.indices, top.values)


def compute_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Return `score`'s entries, with `num_top` most likely tokens for each of S positions."""
    return score(logits, chosen, max(num_top, default=0)).entries(num_top)
