"""POST /v1/chat/completions: how it answers. What it takes: `requests/chat.py`."""

import time
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Literal

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from msgspec import UNSET, UnsetType

from legato.engine.frontend.completion import Completion, CompletionDelta
from legato.model.vocabulary import Vocabulary
from legato.server.context import ArrivalDep, ContextDep
from legato.server.generation.answer import respond
from legato.server.generation.answer_format import Usage, UsageField
from legato.server.generation.job import Job
from legato.server.generation.message import MessageReader, read_message
from legato.server.http.bodies import JsonBytes
from legato.server.openai.logprobs import (
    ChatLogprobs,
    PromptLogprobs,
    chat_logprobs,
    prompt_logprobs,
)
from legato.server.openapi import responses, takes
from legato.server.requests.chat import ChatRequest
from legato.server.requests.outcome import Generation

router = APIRouter(tags=["OpenAI"])


class ChatAnswerMessage(msgspec.Struct, frozen=True):
    content: str | None
    role: Literal["assistant"] = "assistant"


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The last two are vLLM's.

    Attributes:
        stop_reason: the stop string or token id that ended the text.
        token_ids: where `return_token_ids` asks for them.
    """

    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    """Attributes: `role` is on the first delta of a message."""

    content: str
    role: Literal["assistant"] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes: `prompt_token_ids` are on the first chunk of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageField = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatFormat:
    """Words the answers to one request.

    Args:
        prompt: its token ids, which `return_token_ids` may ask for.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        asked: Generation,
        prompt: Sequence[int],
        *,
        answer_id: str,
        created: int,
        model: str,
    ) -> None:
        self._vocabulary = vocabulary
        self._syntax = asked.message_syntax
        self._returns_token_ids = asked.returns_token_ids
        self._prompt = prompt
        self._id = answer_id
        self._created = created
        self._model = model
        self._readers: dict[int, MessageReader] = {}  # key choice, of those begun

    def answer(self, completions: list[Completion], usage: Usage) -> ChatAnswer:
        scored = completions[0].prompt_logprobs
        return ChatAnswer(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(completion) for completion in completions],
            usage=usage,
            prompt_logprobs=UNSET if scored is None else prompt_logprobs(self._vocabulary, scored),
            prompt_token_ids=self._tokens(self._prompt),
        )

    def chunk(self, choice: int, delta: CompletionDelta, usage: UsageField) -> ChatChunk:
        prompt_tokens = UNSET if self._readers else self._tokens(self._prompt)
        is_first = choice not in self._readers
        if is_first:
            self._readers[choice] = MessageReader(self._syntax)
        message = self._readers[choice].feed(delta)
        piece = ChatChunkChoice(
            index=choice,
            delta=ChatDelta(message.content, role="assistant" if is_first else UNSET),
            logprobs=chat_logprobs(self._vocabulary, delta.logprobs),
            finish_reason=message.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=self._tokens(delta.token_ids),
        )
        return self._chunk([piece], usage, prompt_tokens)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return self._chunk([], usage)

    def _choice(self, completion: Completion) -> ChatChoice:
        message = read_message(completion, self._syntax)
        return ChatChoice(
            index=completion.index,
            message=ChatAnswerMessage(message.content),
            logprobs=chat_logprobs(self._vocabulary, completion.logprobs),
            finish_reason=message.finish_reason,
            stop_reason=completion.stop_reason,
            token_ids=self._tokens(completion.token_ids),
        )

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: UsageField,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
        )

    def _tokens(self, token_ids: Iterable[int]) -> list[int] | UnsetType:
        return list(token_ids) if self._returns_token_ids else UNSET


@router.post(
    "/v1/chat/completions",
    openapi_extra=takes(ChatRequest),
    responses=responses(
        ChatAnswer,
        errors=(HTTPStatus.NOT_FOUND, HTTPStatus.INTERNAL_SERVER_ERROR),
        streams=True,
    ),
)
async def create_chat_completion(
    body: JsonBytes, context: ContextDep, arrival: ArrivalDep
) -> Response:
    """Answer a conversation."""
    asked, prompts = await context.text.generation("chat", body)
    answer_format = ChatFormat(
        context.client.vocabulary,
        asked,
        prompts[0],
        answer_id=f"chatcmpl-{arrival.request_id}",
        created=int(time.time()),
        model=context.model_name,
    )
    job = Job.of(
        asked,
        prompts,
        arrival=arrival,
        operation="chat",
        field_names={"prompt": "messages", "max_tokens": asked.output_limit_name},
    )
    return await respond(context, job, answer_format, asked)
