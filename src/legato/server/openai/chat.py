"""POST /v1/chat/completions: what it takes, and how it answers."""

import time
from http import HTTPStatus
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator

from legato.core.errors import InvalidRequestError
from legato.engine.frontend.completion import Completion, CompletionDelta
from legato.model.tokenizer import Tokenizer
from legato.server.context import ArrivalDep, ContextDep
from legato.server.generation.answer import Usage, UsageField, respond
from legato.server.generation.job import Job, run_job
from legato.server.generation.prompts import (
    ChatMessage,
    TemplateOptions,
    chat_token_ids,
    check_text_fits,
)
from legato.server.generation.request import GenerationRequest, NumLogprobs
from legato.server.http.bodies import JsonRoute, only
from legato.server.http.errors import naming_fields
from legato.server.openai.logprobs import (
    ChatLogprobs,
    PromptLogprobs,
    chat_logprobs,
    prompt_logprobs,
)
from legato.server.openapi import responses

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])


class ChatRequest(TemplateOptions, GenerationRequest):
    """Tools, images and structured output are refused: Legato has none of them."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None

    add_special_tokens: Annotated[bool, only(False)] | None = None
    response_format: Annotated[dict[str, Any], only({"type": "text"})] | None = None
    modalities: Annotated[list[str], only(["text"])] | None = None
    tools: Annotated[list[Any], only([])] | None = None
    tool_choice: Annotated[Any, only("none")] = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_together(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs goes with logprobs: true only", param="top_logprobs"
            )
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise InvalidRequestError(
                "max_tokens is the old name of max_completion_tokens; they must not differ",
                param="max_completion_tokens",
            )
        return self

    @property
    def output_limit(self) -> int | None:
        """Most tokens to generate; None takes the room that is left."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class Message(msgspec.Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
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
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class MessageDelta(msgspec.Struct, frozen=True):
    """Attributes: `role` is on the first delta of a message."""

    content: str
    role: Literal["assistant"] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
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
    choices: list[ChatChunkChoice]
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
        piece = ChatChunkChoice(
            index=choice,
            delta=MessageDelta(delta.text, role="assistant" if is_first else UNSET),
            logprobs=chat_logprobs(self._tokenizer, delta.logprobs),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        return self._chunk([piece], usage)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return self._chunk([], usage)

    def _choice(self, completion: Completion) -> ChatChoice:
        return ChatChoice(
            index=completion.index,
            message=Message(completion.text),
            logprobs=chat_logprobs(self._tokenizer, completion.logprobs),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: UsageField) -> ChatChunk:
        return ChatChunk(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage
        )


@router.post(
    "/v1/chat/completions",
    responses=responses(
        ChatAnswer,
        errors=(HTTPStatus.NOT_FOUND, HTTPStatus.INTERNAL_SERVER_ERROR),
        streams=True,
    ),
)
async def create_chat_completion(
    body: ChatRequest, context: ContextDep, arrival: ArrivalDep
) -> Response:
    """Answer a conversation."""
    context.check_model(body.model)
    context.check_completions(body.n)
    answer_format = ChatFormat(
        context.client.tokenizer,
        answer_id=f"chatcmpl-{arrival.request_id}",
        created=int(time.time()),
        model=context.model_name,
    )
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    with naming_fields(prompt="messages", logprobs="top_logprobs", max_tokens=limit_name):
        params = body.sampling_params(
            context.client.defaults.sampling,
            max_tokens=body.output_limit,
            logprobs=body.num_logprobs,
        )
        check_text_fits(context, sum(len(message.content) for message in body.messages))
        prompt = await chat_token_ids(context, body.messages, body)
        job = Job(
            arrival=arrival,
            operation="chat",
            is_streamed=body.stream,
            prompts=[prompt],
            params=params,
            service=body.service_params(),
        )
        return await respond(job, run_job(context, job), answer_format, body)
