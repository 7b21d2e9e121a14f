"""OpenAI's answers to requests for chat completions."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from legato.engine.frontend.completion import Completion, CompletionDelta
from legato.model.tokenizer import Tokenizer
from legato.server.generation.answer import UsageField
from legato.server.generation.usage import Usage
from legato.server.openai.logprobs import (
    ChatLogprobs,
    PromptLogprobs,
    chat_logprobs,
    prompt_logprobs,
)


class Message(msgspec.Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes: `stop_reason` is vLLM's: the stop string or token id that ended the text."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class MessageDelta(msgspec.Struct, frozen=True):
    """Attributes: `role` is on the first delta of a message."""

    content: str
    role: Literal["assistant"] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageField = UNSET


class ChatFormat:
    """Words the answers to one request."""

    def __init__(self, tokenizer: Tokenizer, *, answer_id: str, created: int, model: str) -> None:
        self._tokenizer = tokenizer
        self._id = answer_id
        self._created = created
        self._model = model
        self._begun: set[int] = set()  # choices whose role was told

    def answer(self, completions: list[Completion], usage: Usage) -> ChatAnswer:
        scored = completions[0].prompt_logprobs
        return ChatAnswer(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(completion) for completion in completions],
            usage=usage,
            prompt_logprobs=UNSET if scored is None else prompt_logprobs(self._tokenizer, scored),
        )

    def chunk(self, choice: int, delta: CompletionDelta, usage: UsageField) -> ChatChunk:
        is_first = choice not in self._begun
        self._begun.add(choice)
        piece = ChunkChoice(
            index=choice,
            delta=MessageDelta(delta.text, role="assistant" if is_first else UNSET),
            logprobs=chat_logprobs(self._tokenizer, delta.logprobs),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        return self._chunk([piece], usage)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return self._chunk([], usage)

    def _choice(self, completion: Completion) -> Choice:
        return Choice(
            index=completion.index,
            message=Message(completion.text),
            logprobs=chat_logprobs(self._tokenizer, completion.logprobs),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )

    def _chunk(self, choices: list[ChunkChoice], usage: UsageField) -> ChatChunk:
        return ChatChunk(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage
        )
