"""The Python API's results: a prompt and its completions, or its vector."""

import copy

import msgspec

from legato.core.outputs import FinishReason
from legato.language.completion import Completion
from legato.language.message.message_syntax import MessageSyntax


class Generation:
    """A prompt and its completions.

    Attributes:
        request_id (str): the caller's, or one made for it.
        prompt (str | None): its text; None if it was given as tokens, and for a conversation.
        prompt_token_ids (list[int]): the prompt as the model saw it.
        outputs (list[Completion]): one completion for each of `SamplingParams.n`.
        finished (bool): whether all completions have ended.

    Args:
        syntax: as of `Completion`.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        num_outputs: int,
        syntax: MessageSyntax | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.outputs = [Completion(i, syntax) for i in range(num_outputs)]

    @property
    def finished(self) -> bool:
        """Whether all completions have ended."""
        return all(output.finish_reason is not None for output in self.outputs)

    def snapshot(self) -> "Generation":
        """Return a copy that does not change when this one grows."""
        taken = copy.copy(self)
        taken.outputs = [output.snapshot() for output in self.outputs]
        return taken

    def end_as_aborted(self) -> None:
        """Mark the unfinished completions as aborted."""
        for output in self.outputs:
            output.finish_reason = output.finish_reason or FinishReason.ABORT


class EmbeddingOutput(msgspec.Struct, frozen=True):
    """A vector.

    Attributes:
        embedding: its numbers.
    """

    embedding: list[float]


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and its vector.

    Attributes:
        prompt: its text; None if it was given as tokens.
        prompt_token_ids: the prompt as the model saw it.
        outputs: its vector.
        num_cached_tokens: prompt tokens that were found in the cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int
