"""What the answers of all endpoints have in common, before each words them."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from legato.engine.frontend.completion import CompletionDelta
from legato.server.http.errors import ApiError


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """OpenAI's usage object."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class WholeAnswer(Protocol):
    """An answer in one piece."""

    def take(self, choice: int, delta: CompletionDelta) -> object:
        """A delta has come."""

    def pieces(self) -> Iterable[bytes]:
        """The answer in JSON, once all have come; a piece is made when it is read."""


class EventWriter(Protocol):
    """An answer in server-sent events."""

    def delta(self, choice: int, delta: CompletionDelta) -> bytes:
        """The events that word one delta; with the first delta, those that begin the stream."""

    def end(self) -> Iterable[bytes]:
        """The pieces that follow the last delta; each is made when it is read."""

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """The same for a stream that has begun and is ended by an error."""


class AnswerFormat(Protocol):
    """How one endpoint words the answer to one request: whole or in events, whichever is asked."""

    def whole(self) -> WholeAnswer: ...

    def events(self) -> EventWriter: ...


class UsageCounter:
    """Counts what the deltas of one request bring; its prompts count once each."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self._num_prompt_tokens = sum(map(len, prompts))
        self._num_cached_tokens: dict[int, int] = {}  # key choice, the first of its prompt
        self._num_output_tokens = 0

    def add(self, choice: int, delta: CompletionDelta) -> None:
        self._num_output_tokens += len(delta.token_ids)
        num_cached = delta.output.num_cached_tokens
        if delta.index == 0 and num_cached:
            self._num_cached_tokens[choice] = num_cached

    @property
    def so_far(self) -> Usage:
        return Usage(
            self._num_prompt_tokens,
            self._num_output_tokens,
            self._num_prompt_tokens + self._num_output_tokens,
            PromptTokensDetails(sum(self._num_cached_tokens.values())),
        )
