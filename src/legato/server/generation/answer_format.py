"""What the answers of all endpoints have in common, before each words them."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from legato.core.outputs import FinishReason
from legato.engine.frontend.completion import Completion, CompletionDelta
from legato.server.requests.outcome import Generation


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """OpenAI's usage object."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


UsageField = Usage | None | msgspec.UnsetType


class AnswerFormat(Protocol):
    """How one endpoint words its answers."""

    def answer(self, completions: list[Completion], usage: Usage) -> msgspec.Struct:
        """All completions at once, in the order of their choice index."""

    def chunk(self, choice: int, delta: CompletionDelta, usage: UsageField) -> msgspec.Struct:
        """One piece of one completion."""

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """The end of a stream that was to tell its usage."""


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


def shown(delta: CompletionDelta, asked: Generation) -> CompletionDelta:
    """What a client gets to see of a delta: none of its output, where it wants its prompt alone."""
    if not asked.is_echo_only:
        return delta
    return msgspec.structs.replace(
        delta,
        text="",
        token_ids=(),
        logprobs=None if delta.logprobs is None else (),
        finish_reason=delta.finish_reason and FinishReason.LENGTH,
        stop_reason=None,
    )
