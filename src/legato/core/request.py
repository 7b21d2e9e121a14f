"""A request: the frozen message that asks for it and the one mutable record of its progress."""

import msgspec

from legato.core.outputs import FinishReason
from legato.core.sampling_params import SamplingParams


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A validated, tokenized request on its way to the engine.

    Attributes:
        request_id: unique among all requests the engine holds.
        prompt_token_ids: at least one token.
        params: with `seed` and `max_tokens` resolved to numbers; `n` is 1 (the front end fans out).
        eos_token_ids: the model's end-of-sequence tokens, empty where `ignore_eos` is set.
        arrival_time_s: when the front end received it, on the machine's monotonic clock.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    arrival_time_s: float = 0.0


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop a request, wherever it is; unknown or ended requests are ignored."""

    request_id: str


Event = AddRequest | AbortRequest


class Request:
    """A request's progress: a row of tokens, the first `num_computed_tokens` of which are cached.

    There is no phase flag. A request with one token left to compute is decoding, one with more is
    prefilling, and a preempted one simply has nothing computed.
    """

    __slots__ = (
        "finish_reason",
        "message",
        "num_computed_tokens",
        "num_preemptions",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, message: AddRequest) -> None:
        self.message = message
        self.token_ids: list[int] = list(message.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def params(self) -> SamplingParams:
        return self.message.params

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.message.prompt_token_ids)

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens whose keys and values are yet to be computed; 1 while decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    def append(self, token_id: int, max_model_len: int) -> None:
        """Take a sampled token and decide whether it ends the request."""
        self.token_ids.append(token_id)
        num_output_tokens = self.num_output_tokens
        if num_output_tokens >= self.params.min_tokens:
            if token_id in self.message.eos_token_ids:
                self.finish_reason = FinishReason.STOP
                return
            if token_id in self.params.stop_token_ids:
                self.finish_reason = FinishReason.STOP
                self.stop_reason = token_id
                return
        if num_output_tokens == self.params.max_tokens or self.num_tokens >= max_model_len:
            self.finish_reason = FinishReason.LENGTH
