"""What leaves the engine for a request."""

import enum

import msgspec


class FinishReason(enum.StrEnum):
    """Why a request ended. Every request ends with exactly one of these."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REFUSED = "refused"


class RefusalReason(enum.StrEnum):
    """Why a request was refused."""

    QUEUE_FULL = "queue_full"
    TTFT_SLO = "ttft_slo"


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities at one position, from the model's raw logits (before any penalty).

    Attributes:
        logprob: of `token_id`, the token that stands there.
        rank: 1 for the most likely token.
        top: (token id, logprob) of the most likely tokens, best first; as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What one step brought for one request: a delta.

    Attributes:
        logprobs: one entry a new token, or None where not asked for.
        prompt_logprobs: entries for the prompt tokens that this step scored, likewise.
        stop_reason: the stop token id that ended the request, if one did.
        error: what went wrong, where the finish reason is ERROR or REFUSED.
        is_asked_for: whether an ERROR follows from what the request asks for.
        refusal: why it is REFUSED.
        retry_after_s: where it is REFUSED, when the same request is expected to be taken.
        num_cached_tokens: prompt tokens that were not computed because their blocks were cached.
        is_promise_waived: whether it is served best-effort, as `allow_best_effort` allows.
        scheduled_s: when the step was planned from which on it ran, on the clock of
            `AddRequest.arrival_time_s`; None before.
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    is_asked_for: bool = False
    refusal: RefusalReason | None = None
    retry_after_s: float | None = None
    num_cached_tokens: int = 0
    is_promise_waived: bool = False
    scheduled_s: float | None = None
