"""The engine's outputs for a request."""

import enum
from array import array
from collections.abc import Iterable, Iterator, Sequence

import msgspec

_SCORE_BYTES = 4
"""Size of each number of `TokenScores`."""


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
        logprob: log probability of `token_id`, the token at the position.
        rank: 1 for the most likely token.
        top: (token id, logprob) of the most likely tokens, best first; as many as were asked for.
            With `logprob_token_ids`, of those tokens and of the token itself.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class TokenScores(msgspec.Struct, frozen=True, gc=False):
    """Log probabilities at N positions of a prompt; each is read as a `TokenLogprobs`.

    Attributes:
        num_top: number of most likely tokens at each position.
        token_ids: int32 [N, 1 + num_top], the token at the position and then the most likely ones,
            best first.
        logprobs: float32 [N, 1 + num_top], log probabilities of these tokens.
        ranks: int32 [N], ranks of the tokens at the positions.
    """

    # Bytes: the 170,000 log probabilities of 8,000 tokens would take 20 MB as objects, and 60 ms of
    # the process that receives them.
    num_top: int
    token_ids: bytes
    logprobs: bytes
    ranks: bytes

    @classmethod
    def of(cls, entries: Sequence[TokenLogprobs]) -> "TokenScores":
        """Args: entries: all with the same number of most likely tokens."""
        token_ids, logprobs = array("i"), array("f")
        for entry in entries:
            token_ids.extend((entry.token_id, *(token_id for token_id, _ in entry.top)))
            logprobs.extend((entry.logprob, *(logprob for _, logprob in entry.top)))
        ranks = array("i", [entry.rank for entry in entries])
        num_top = len(entries[0].top) if entries else 0
        return cls(num_top, token_ids.tobytes(), logprobs.tobytes(), ranks.tobytes())

    @classmethod
    def joined(cls, parts: "Sequence[TokenScores]") -> "TokenScores":
        """Args: parts: at least one, with the same `num_top`."""
        return cls(
            parts[0].num_top,
            b"".join(part.token_ids for part in parts),
            b"".join(part.logprobs for part in parts),
            b"".join(part.ranks for part in parts),
        )

    def __len__(self) -> int:
        return len(self.ranks) // _SCORE_BYTES

    def __iter__(self) -> Iterator[TokenLogprobs]:
        token_ids = memoryview(self.token_ids).cast("i")
        logprobs = memoryview(self.logprobs).cast("f")
        ranks = memoryview(self.ranks).cast("i")
        width = 1 + self.num_top
        for place, rank in enumerate(ranks):
            start, end = place * width, (place + 1) * width
            ids, values = token_ids[start:end].tolist(), logprobs[start:end].tolist()
            top = tuple(zip(ids[1:], values[1:], strict=True))
            yield TokenLogprobs(ids[0], values[0], rank, top)


def entries_of(parts: Iterable[TokenScores]) -> Iterator[TokenLogprobs]:
    """Yield the entries of all positions, each made when it is read."""
    for part in parts:
        yield from part


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One step's output for one request: a delta.

    Attributes:
        logprobs: one entry for each new token; None if not asked for.
        prompt_logprobs: scores of the prompt tokens that this step scored; None if not asked for.
        stop_reason: the stop token id that ended the request, if one did.
        error: what went wrong, if the finish reason is ERROR or REFUSED.
        is_asked_for: whether an ERROR follows from the request's own settings.
        refusal: why the request is REFUSED.
        retry_after_s: if REFUSED, seconds after which the same request is expected to be accepted.
        num_cached_tokens: prompt tokens that were not computed because their blocks were cached.
        is_promise_waived: whether it is served best-effort, as `allow_best_effort` allows.
        scheduled_s: planning time of the step that admitted the request, on the clock of
            `AddRequest.arrival_time_s`; None before.
        pooled: float32 [E], the vector that ends a pooled request.
        num_thinking_tokens: tokens of thinking so far, of a request whose thinking is counted.
        is_thinking_cut: whether its thinking was ended at its budget.
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: TokenScores | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    is_asked_for: bool = False
    refusal: RefusalReason | None = None
    retry_after_s: float | None = None
    num_cached_tokens: int = 0
    is_promise_waived: bool = False
    scheduled_s: float | None = None
    pooled: bytes | None = None
    num_thinking_tokens: int = 0
    is_thinking_cut: bool = False
