"""POST /v1/chat/completions: its answers. Its requests are in `chat_body.py`."""

from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from msgspec import UNSET, UnsetType

from legato.api.answer import FINGERPRINT, Usage
from legato.api.context import ArrivalDep, ContextDep
from legato.api.http.bodies import JsonBytes
from legato.api.http.json_text import array, listed
from legato.api.job import Job
from legato.api.openai.chat_body import ChatRequest
from legato.api.openai.chunks import ChunkFormat, TimedAnswer, UsageField, respond_in_chunks
from legato.api.openai.logprobs import ChatLogprobs, PromptLogprobs
from legato.api.openapi import body_route
from legato.core.vocabulary import Vocabulary
from legato.engine.client.kv_tickets import KVTransferParams
from legato.language.completion import Completion, CompletionDelta
from legato.language.message.message import (
    TOOL_CALLS,
    Message,
    MessageDelta,
    MessageReader,
    ToolCallDelta,
    read_message,
)

router = APIRouter(tags=["OpenAI"])


class ChatFunction(msgspec.Struct, frozen=True):
    """Attributes: `arguments` is a JSON text."""

    name: str
    arguments: str


class ChatToolCall(msgspec.Struct, frozen=True):
    id: str
    function: ChatFunction
    type: Literal["function"] = "function"


class ChatAnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes: `reasoning` is vLLM's name of `reasoning_content`."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET
    function_call: ChatFunction | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice; the last two fields are vLLM's.

    Attributes:
        stop_reason: the stop string or token id that ended the text.
        token_ids: with `return_token_ids`.
    """

    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None


class ChatAnswer(TimedAnswer, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str = FINGERPRINT
    service_tier: Literal["default"] = "default"
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    kv_transfer_params: KVTransferParams | None


class ChatFunctionDelta(msgspec.Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class ChatToolCallDelta(msgspec.Struct, frozen=True):
    """Attributes: `id`, `type` and the name are on a call's first delta."""

    index: int
    function: ChatFunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    """Attributes: `role` is on a message's first delta; the rest as of `ChatAnswerMessage`."""

    content: str | UnsetType = UNSET
    role: Literal["assistant"] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatToolCallDelta] | UnsetType = UNSET
    function_call: ChatFunctionDelta | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(TimedAnswer, frozen=True, kw_only=True):
    """Attributes: `prompt_token_ids` are on the first chunk of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageField = UNSET
    system_fingerprint: str = FINGERPRINT
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatFormat(ChunkFormat):
    """Formats chats."""

    def __init__(self, vocabulary: Vocabulary, job: Job, **known: Any) -> None:
        super().__init__(vocabulary, job, **known)
        self._syntax = job.answer.message_syntax
        self._prompt = job.prompts[0].token_ids
        self._calls_functions = job.answer.calls_functions
        self._readers: dict[int, MessageReader] = {}  # key: choice, once begun

    def answer(self, completions: list[Completion], usage: Usage) -> ChatAnswer:
        scored = completions[0].prompt_scores
        return ChatAnswer(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=listed(map(self._choice, completions)),
            usage=usage,
            prompt_logprobs=None if scored is None else array(self._logprobs.prompt(scored)),
            prompt_token_ids=self._tokens(self._prompt) or None,
            kv_transfer_params=self._ticket,
        )

    def chunk(self, choice: int, delta: CompletionDelta, usage: UsageField) -> ChatChunk:
        prompt_tokens = UNSET if self._readers else self._tokens(self._prompt)
        is_first = choice not in self._readers
        if is_first:
            self._readers[choice] = MessageReader(self._syntax)
        reader = self._readers[choice]
        message = reader.feed(delta.text, delta.finish_reason, delta.stop_reason)
        role: Literal["assistant"] | UnsetType = "assistant" if is_first else UNSET
        is_plain = self._syntax is None
        piece = ChatChunkChoice(
            index=choice,
            delta=ChatDelta(delta.text, role) if is_plain else self._delta(message, role),
            logprobs=None if delta.logprobs is None else self._logprobs.chat(delta.logprobs),
            finish_reason=self._finish_reason(message.finish_reason),
            stop_reason=delta.stop_reason,
            token_ids=self._tokens(delta.token_ids),
        )
        return self._chunk([piece], usage, prompt_tokens)

    def usage_chunk(self, usage: UsageField) -> ChatChunk:
        return self._chunk([], usage)

    def _choice(self, completion: Completion) -> ChatChoice:
        message = read_message(
            completion.text, completion.finish_reason, self._syntax, completion.stop_reason
        )
        return ChatChoice(
            index=completion.index,
            message=answer_message(message, calls_functions=self._calls_functions),
            logprobs=self._logprobs.chat(completion.logprobs),
            finish_reason=self._finish_reason(message.finish_reason),
            stop_reason=completion.stop_reason,
            token_ids=self._tokens(completion.token_ids) or None,
        )

    def _delta(self, message: MessageDelta, role: Literal["assistant"] | UnsetType) -> ChatDelta:
        if not (message.reasoning or message.tool_calls):
            return ChatDelta(message.content, role)
        reasoning = message.reasoning or UNSET
        calls = [_tool_call_delta(call) for call in message.tool_calls]
        is_function = self._calls_functions and bool(calls)
        return ChatDelta(
            content=message.content or UNSET,
            role=role,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=UNSET if is_function else calls or UNSET,
            function_call=calls[0].function if is_function else UNSET,
        )

    def _finish_reason(self, reason: str | None) -> str | None:
        return "function_call" if self._calls_functions and reason == TOOL_CALLS else reason

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


def answer_message(message: Message, *, calls_functions: bool = False) -> ChatAnswerMessage:
    """Return a message in OpenAI's format.

    Args:
        calls_functions: as of `AnswerOptions`.
    """
    reasoning = UNSET if message.reasoning is None else message.reasoning
    functions = [ChatFunction(call.name, call.arguments) for call in message.tool_calls]
    if calls_functions and functions:
        called: dict[str, Any] = {"function_call": functions[0]}
    elif functions:
        ids = (call.id for call in message.tool_calls)
        called = {"tool_calls": list(map(ChatToolCall, ids, functions))}
    else:
        called = {}
    return ChatAnswerMessage(
        content=message.content, reasoning_content=reasoning, reasoning=reasoning, **called
    )


def _tool_call_delta(call: ToolCallDelta) -> ChatToolCallDelta:
    if call.name is None or call.id is None:
        return ChatToolCallDelta(call.index, ChatFunctionDelta(call.arguments))
    function = ChatFunctionDelta(call.arguments, call.name)
    return ChatToolCallDelta(call.index, function, call.id, "function")


@router.post("/v1/chat/completions", **body_route(ChatRequest, ChatAnswer, streams=True))
async def create_chat_completion(
    body: JsonBytes, context: ContextDep, arrival: ArrivalDep
) -> Response:
    """Answer a conversation."""
    job = await context.text.job("chat", body, arrival)
    answer_id = f"chatcmpl-{arrival.answer_id}"
    return await respond_in_chunks(context, job, arrival, answer_id, ChatFormat)
