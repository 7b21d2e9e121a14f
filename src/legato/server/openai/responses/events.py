"""The events that tell how a response comes about."""

import msgspec

from legato.server.http.bodies import encode_json, named_event
from legato.server.openai.logprobs import TokenLogprob
from legato.server.openai.responses.output import (
    OutputItem,
    OutputText,
    ReasoningText,
    ResponseAnswer,
)


class Event(msgspec.Struct, frozen=True, tag_field="type"):
    """One of a stream's; its `sequence_number`, from 0, it gets where it is written."""


class ResponseCreated(Event, frozen=True, tag="response.created"):
    response: ResponseAnswer | msgspec.Raw


class ResponseInProgress(Event, frozen=True, tag="response.in_progress"):
    response: ResponseAnswer | msgspec.Raw


class ResponseCompleted(Event, frozen=True, tag="response.completed"):
    response: ResponseAnswer | msgspec.Raw


class ResponseIncomplete(Event, frozen=True, tag="response.incomplete"):
    response: ResponseAnswer | msgspec.Raw


class ResponseFailed(Event, frozen=True, tag="response.failed"):
    response: ResponseAnswer | msgspec.Raw


class ItemAdded(Event, frozen=True, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(Event, frozen=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class _OfItem(Event, frozen=True):
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


class EventNumbers:
    """Writes events, and numbers them."""

    def __init__(self) -> None:
        self._next = 0

    def written(self, events: list[Event]) -> bytes:
        return b"".join(map(self._written, events))

    def _written(self, event: Event) -> bytes:
        number = b'{"sequence_number":%d,' % self._next
        self._next += 1
        tag = type(event).__struct_config__.tag
        assert isinstance(tag, str)
        return named_event(tag.encode(), number + encode_json(event)[1:])
