"""The interfaces and the usage object common to the answers of all endpoints."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from legato.api.http.errors import ApiError
from legato.core.version import __version__
from legato.language.completion import CompletionDelta

FINGERPRINT = f"legato-{__version__}"
"""OpenAI's `system_fingerprint`: with the same one and the same seed, outputs are alike."""


class LegatoNotes(msgspec.Struct, frozen=True):
    """Attributes: `warnings`: the fields and tools of the request that had no effect."""

    warnings: list[str]


class NotedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes: `legato` is present if there are warnings."""

    legato: LegatoNotes | UnsetType = UNSET


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """OpenAI's usage object."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class WholeAnswer(Protocol):
    """An answer in one JSON object."""

    def take(self, choice: int, delta: CompletionDelta) -> object:
        """Add a delta."""

    def pieces(self) -> Iterable[bytes]:
        """Return the answer's JSON after the last delta; each piece is made when it is read."""


class EventWriter(Protocol):
    """Formats an answer as server-sent events."""

    def delta(self, choice: int, delta: CompletionDelta) -> bytes:
        """Return the events of one delta; with the first delta, the stream's first events too."""

    def end(self) -> Iterable[bytes]:
        """Return the pieces after the last delta; each is made when it is read."""

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """Return the last pieces of a stream that an error ends."""


class AnswerFormat(Protocol):
    """How one endpoint formats an answer, whole or as events."""

    def whole(self) -> WholeAnswer: ...

    def events(self) -> EventWriter: ...


class UsageCounter:
    """Counts the tokens of one request. Each prompt counts once, for any `n`."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self._num_prompt_tokens = sum(map(len, prompts))
        self._num_cached_tokens: dict[int, int] = {}  # key: index of a prompt's first choice
        self._num_output_tokens = 0

    def add(self, choice: int, delta: CompletionDelta) -> None:
        self._num_output_tokens += len(delta.token_ids)
        self.add_cached(choice, delta)

    def add_cached(self, choice: int, delta: CompletionDelta) -> None:
        """Count the cached tokens of a delta's prompt, which each delta repeats."""
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
