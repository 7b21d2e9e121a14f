"""What a caller of the engine receives: text and tokens of one completion, as they come."""

import msgspec

from legato.core.outputs import FinishReason, RequestOutput, TokenLogprobs


class CompletionDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New text and tokens of one completion of a prompt.

    Attributes:
        output: what the engine told. The other attributes differ from its own at a stop string,
            behind which the engine may have gone on.
        index: which of the prompt's `n` completions, from 0.
        text: whole characters only; may be empty while a character or a possible stop string is
            incomplete. The texts of all deltas concatenated are the completion.
        token_ids: sampled since the last delta.
        logprobs: one entry a token, or None where not asked for.
        finish_reason: set on the completion's last delta.
        stop_reason: the stop string or stop token id that ended it, if one did.
        received_s: when the front end had the output, on the clock of its times.
    """

    output: RequestOutput
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    received_s: float


class Completion:
    """One completion put together from its deltas; attributes as in these, or their outputs."""

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
        self.prompt_logprobs = _extended(self.prompt_logprobs, delta.output.prompt_logprobs)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.num_cached_tokens = max(self.num_cached_tokens, delta.output.num_cached_tokens)

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
