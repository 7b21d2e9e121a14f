"""POST /v1/chat/completions: how it answers. What it takes: `requests/chat.py`."""

import time
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
    """Attributes: `stop_reason` is vLLM's: the stop string or token id that ended the text."""

    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


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


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageField = UNSET


class ChatFormat:
    """Words the answers to one request."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        asked: Generation,
        *,
        answer_id: str,
        created: int,
        model: str,
    ) -> None:
        self._vocabulary = vocabulary
        self._syntax = asked.message_syntax
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
        )

    def chunk(self, choice: int, delta: CompletionDelta, usage: UsageField) -> ChatChunk:
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
        )
        return self._chunk([piece], usage)

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
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: UsageField) -> ChatChunk:
        return ChatChunk(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage
        )


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
