"""What a caller of the engine receives: text and tokens of one completion, as they come."""

import msgspec

from legato.core.outputs import FinishReason, TokenLogprobs


class CompletionDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New text and tokens of one completion of a prompt.

    Attributes:
        index: which of the prompt's `n` completions, from 0.
        text: whole characters only; may be empty while a character or a possible stop string is
            incomplete. The texts of all deltas concatenated are the completion.
        token_ids: sampled since the last delta.
        logprobs: one entry a token, or None where not asked for.
        prompt_logprobs: entries for the prompt tokens from the second on, in order, as their chunks
            are computed; only on index 0.
        finish_reason: set on the completion's last delta.
        stop_reason: the stop string or stop token id that ended it, if one did.
        num_cached_tokens: prompt tokens found in the cache.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
