"""Token counts of a request."""

from collections.abc import Sequence

import msgspec

from legato.engine.frontend.completion import CompletionDelta


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """OpenAI's usage object."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class UsageCounter:
    """Counts what the deltas of one request bring; its prompts count once each."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self._num_prompt_tokens = sum(map(len, prompts))
        self._num_cached_tokens = [0] * len(prompts)
        self._num_output_tokens = 0

    def add(self, prompt_index: int, delta: CompletionDelta) -> None:
        self._num_output_tokens += len(delta.token_ids)
        num_cached = delta.output.num_cached_tokens
        if delta.index == 0 and num_cached:
            self._num_cached_tokens[prompt_index] = num_cached

    @property
    def so_far(self) -> Usage:
        return Usage(
            self._num_prompt_tokens,
            self._num_output_tokens,
            self._num_prompt_tokens + self._num_output_tokens,
            PromptTokensDetails(sum(self._num_cached_tokens)),
        )
