"""The events of a streamed response."""

from collections.abc import Iterator

import msgspec

from legato.api.http.bodies import TypedEvent
from legato.api.http.json_pieces import json_pieces
from legato.api.openai.logprobs import TokenLogprob
from legato.api.responses.output import (
    OutputItem,
    OutputText,
    ReasoningText,
    ResponseAnswer,
)


class ResponseCreated(TypedEvent, frozen=True, tag="response.created"):
    response: ResponseAnswer | msgspec.Raw


class ResponseQueued(TypedEvent, frozen=True, tag="response.queued"):
    response: ResponseAnswer | msgspec.Raw


class ResponseInProgress(TypedEvent, frozen=True, tag="response.in_progress"):
    response: ResponseAnswer | msgspec.Raw


class ResponseCompleted(TypedEvent, frozen=True, tag="response.completed"):
    response: ResponseAnswer | msgspec.Raw


class ResponseIncomplete(TypedEvent, frozen=True, tag="response.incomplete"):
    response: ResponseAnswer | msgspec.Raw


class ResponseFailed(TypedEvent, frozen=True, tag="response.failed"):
    response: ResponseAnswer | msgspec.Raw


class ItemAdded(TypedEvent, frozen=True, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(TypedEvent, frozen=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class _OfItem(TypedEvent, frozen=True):
    item_id: str
    output_index: int


class _OfPart(_OfItem, frozen=True):
    content_index: int


class PartAdded(_OfPart, frozen=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(_OfPart, frozen=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextDelta(_OfPart, frozen=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(_OfPart, frozen=True, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(_OfPart, frozen=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_OfPart, frozen=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(_OfItem, frozen=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_OfItem, frozen=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class InputDelta(_OfItem, frozen=True, tag="response.custom_tool_call_input.delta"):
    delta: str


class InputDone(_OfItem, frozen=True, tag="response.custom_tool_call_input.done"):
    input: str


class StreamError(TypedEvent, frozen=True, tag="error"):
    """The last event of a stream whose response is no longer stored."""

    sequence_number: int
    code: str = "response_not_stored"
    message: str = "the response is no longer stored: it was deleted, or others took its room"
    param: str | None = None


class EventNumbers:
    """Numbers events from 0, in the order in which they are written."""

    def __init__(self) -> None:
        self._next = 0

    def encode(self, event: TypedEvent) -> Iterator[bytes]:
        """Yield the next event's JSON, in pieces."""
        yield b'{"sequence_number":%d,' % self._next
        self._next += 1
        pieces = json_pieces(event)
        yield next(pieces)[1:]
        yield from pieces
