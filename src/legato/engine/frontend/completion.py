"""What a caller of the engine receives: text and tokens of one completion, as they come."""

import msgspec

from legato.core.outputs import FinishReason, TokenLogprobs


class CompletionDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New text and tokens of one completion of a prompt.

    Attributes:
        index: which of the prompt's `n` completions, from 0.
        request_id: the engine's, by which its records know the completion.
        text: whole characters only; may be empty while a character or a possible stop string is
            incomplete. The texts of all deltas concatenated are the completion.
        token_ids: sampled since the last delta.
        logprobs: one entry a token, or None where not asked for.
        prompt_logprobs: entries for the prompt tokens from the second on, in order, as their chunks
            are computed; only on index 0.
        finish_reason: set on the completion's last delta.
        stop_reason: the stop string or stop token id that ended it, if one did.
        num_cached_tokens: prompt tokens found in the cache.
        is_promise_waived, scheduled_s, received_s: as in `RequestOutput`.
    """

    index: int
    request_id: str = ""
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    is_promise_waived: bool = False
    scheduled_s: float | None = None
    received_s: float = 0.0


class Completion:
    """One completion, put together from its deltas.

    Attributes:
        index (int): which of the prompt's `n` completions this is, from 0.
        text (str): the completion without the prompt.
        token_ids (list[int]): the tokens that were sampled.
        logprobs (list[TokenLogprobs] | None): one entry a token; None where not asked for.
        prompt_logprobs (list[TokenLogprobs] | None): one entry for each prompt token from the
            second on; None where not asked for, and only on index 0.
        finish_reason (FinishReason | None): why it ended; None as long as it goes on.
        stop_reason (int | str | None): the stop string or stop token id that ended it, if one did.
        num_cached_tokens (int): prompt tokens that were found in the cache.
        cumulative_logprob (float | None): sum of `logprobs`.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_cached_tokens = 0

    def add(self, delta: CompletionDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs = _extended(self.logprobs, delta.logprobs)
        self.prompt_logprobs = _extended(self.prompt_logprobs, delta.prompt_logprobs)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the sampled tokens' log probabilities, where they were asked for."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


def _extended(
    entries: list[TokenLogprobs] | None, new: tuple[TokenLogprobs, ...] | None
) -> list[TokenLogprobs] | None:
    """`entries` with `new` behind them, in place; None as long as neither was asked for."""
    if new is None:
        return entries
    if entries is None:
        return list(new)
    entries += new
    return entries
