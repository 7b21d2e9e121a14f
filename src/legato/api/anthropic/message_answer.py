"""POST /v1/messages: its answers. Its requests are in `message_body.py`."""

from fastapi import APIRouter
from fastapi.responses import Response
from msgspec import UNSET, UnsetType

from legato.api.answer import UsageCounter, notes_of, respond
from legato.api.anthropic.message_body import (
    CountTokensRequest,
    MessagesRequest,
    MessageTerms,
    TokenCount,
)
from legato.api.anthropic.output_blocks import (
    ContentBlocks,
    ContextEdits,
    MessageAnswer,
    MessageChange,
    MessageDeltaEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    PingEvent,
    StopReason,
)
from legato.api.arrival import Arrival
from legato.api.context import ArrivalDep, ContextDep
from legato.api.http.bodies import JsonBytes, TypedEvent, pieces_response
from legato.api.http.error_responses import AnthropicErrorBody, anthropic_error
from legato.api.http.errors import ApiError
from legato.api.http.json_text import encode_json
from legato.api.job import Job
from legato.api.openapi import body_route
from legato.api.submit import JobRun
from legato.api.typed_events import TypedEventWriter
from legato.core.outputs import FinishReason
from legato.language.completion import CompletionDelta
from legato.language.message.message import MessageReader

router = APIRouter(tags=["Anthropic"])


class MessagesFormat:
    """Formats the answer to one request.

    Args:
        max_model_len: of the model's context, in tokens.
    """

    def __init__(self, job: Job, arrival: Arrival, *, model: str, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        terms = job.terms_as(MessageTerms)
        edits = terms.edits
        self._edits: ContextEdits | UnsetType = UNSET if edits is None else ContextEdits(edits)
        self._arrival = arrival
        self._model = model
        self._usage = UsageCounter(job.num_prompt_tokens)
        self._reader = MessageReader(job.answer.message_syntax)
        self._blocks = ContentBlocks(omits_thinking=terms.omits_thinking)
        self._stop_reason: StopReason | None = None
        self._stop_sequence: str | None = None

    def whole(self) -> "MessagesFormat":
        return self

    def events(self) -> TypedEventWriter:
        return TypedEventWriter(self)

    def begun(self, first: CompletionDelta | None) -> list[TypedEvent]:
        if first is not None:
            self._usage.add_cached(0, first)
        return [MessageStart(self._answer()), PingEvent()]

    def take(self, choice: int, delta: CompletionDelta) -> list[TypedEvent]:
        self._usage.add(choice, delta)
        message = self._reader.feed(delta.text, delta.finish_reason, delta.stop_reason)
        if delta.finish_reason is not None:
            self._note_end(delta, message.finish_reason == "tool_calls")
        return self._blocks.take(message)

    def ended(self) -> list[TypedEvent]:
        change = MessageChange(self._stop_reason, self._stop_sequence)
        delta = MessageDeltaEvent(change, self._message_usage, self._edits, notes_of(self._arrival))
        return [*self._blocks.close(), delta, MessageStop()]

    def failed(self, error: ApiError) -> list[TypedEvent]:
        return [anthropic_error(error, self._arrival.request_id)]

    def pieces(self) -> list[bytes]:
        self._blocks.close()
        return [encode_json(self._answer())]

    def _answer(self) -> MessageAnswer:
        """The message so far, with its complete blocks."""
        return MessageAnswer(
            id=f"msg_{self._arrival.answer_id}",
            model=self._model,
            content=list(self._blocks.done),
            stop_reason=self._stop_reason,
            stop_sequence=self._stop_sequence,
            usage=self._message_usage,
            context_management=self._edits,
            legato=notes_of(self._arrival),
        )

    @property
    def _message_usage(self) -> MessageUsage:
        usage = self._usage.so_far
        num_cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(
            input_tokens=usage.prompt_tokens - num_cached,
            cache_read_input_tokens=num_cached,
            output_tokens=usage.completion_tokens,
        )

    def _note_end(self, delta: CompletionDelta, calls_tools: bool) -> None:
        if delta.finish_reason is FinishReason.LENGTH:
            usage = self._usage.so_far
            is_full = usage.total_tokens >= self._max_model_len
            self._stop_reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif calls_tools:
            self._stop_reason = "tool_use"
        elif isinstance(delta.stop_reason, str):
            self._stop_reason, self._stop_sequence = "stop_sequence", delta.stop_reason
        else:
            self._stop_reason = "end_turn"


@router.post(
    "/v1/messages",
    **body_route(MessagesRequest, MessageAnswer, streams=True, error_body=AnthropicErrorBody),
)
async def create_message(body: JsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Answer the next turn of a conversation."""
    job = await context.text.job("messages", body, arrival)
    answer_format = MessagesFormat(
        job, arrival, model=context.model_name, max_model_len=context.engine.info.max_model_len
    )
    return await respond(JobRun(context, job, arrival), answer_format)


@router.post(
    "/v1/messages/count_tokens",
    **body_route(CountTokensRequest, TokenCount, is_computed=False, error_body=AnthropicErrorBody),
)
async def count_tokens(body: JsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Count the tokens of a conversation's prompt."""
    return pieces_response(await context.text.answer("count_tokens", body, arrival))
