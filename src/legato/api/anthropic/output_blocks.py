"""The content blocks of a message, made of its deltas, and their events."""

import json
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from legato.api.answer import LegatoNotes, NotedAnswer
from legato.api.anthropic.context_edits import AppliedEdit
from legato.api.anthropic.input_blocks import signature
from legato.api.http.bodies import TypedEvent
from legato.language.message.message import MessageDelta, ToolCallDelta

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class TextContent(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingContent(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """Attributes: `signature` has the text if `thinking` omits it, else it is empty."""

    thinking: str
    signature: str = ""


class ToolUseContent(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Content = TextContent | ThinkingContent | ToolUseContent


class MessageUsage(msgspec.Struct, frozen=True):
    """Attributes: `input_tokens` counts the prompt's tokens that were not in the cache."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0


class ContextEdits(msgspec.Struct, frozen=True):
    """What was cleared from the conversation before the model read it."""

    applied_edits: list[AppliedEdit]


class MessageAnswer(NotedAnswer, frozen=True, kw_only=True):
    """Attributes: `context_management` is present if the request has it."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    context_management: ContextEdits | UnsetType = UNSET


class MessageStart(TypedEvent, frozen=True, tag="message_start"):
    message: MessageAnswer


class PingEvent(TypedEvent, frozen=True, tag="ping"):
    """Carries no data."""


class BlockStart(TypedEvent, frozen=True, tag="content_block_start"):
    index: int
    content_block: Content


class TextPiece(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingPiece(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputPiece(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class SignaturePiece(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str


Piece = TextPiece | ThinkingPiece | InputPiece | SignaturePiece


class BlockDelta(TypedEvent, frozen=True, tag="content_block_delta"):
    index: int
    delta: Piece


class BlockStop(TypedEvent, frozen=True, tag="content_block_stop"):
    index: int


class MessageChange(msgspec.Struct, frozen=True):
    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDeltaEvent(TypedEvent, frozen=True, tag="message_delta"):
    """Attributes: `usage`, `context_management` and `legato` are the whole message's."""

    delta: MessageChange
    usage: MessageUsage
    context_management: ContextEdits | UnsetType = UNSET
    legato: LegatoNotes | UnsetType = UNSET


class MessageStop(TypedEvent, frozen=True, tag="message_stop"):
    """The last event."""


class ContentBlocks:
    """Builds a message's content block by block, from its deltas.

    Args:
        omits_thinking: whether the text of thinking is in the signature only.

    Attributes:
        done: the complete blocks.
    """

    def __init__(self, *, omits_thinking: bool = False) -> None:
        self._omits_thinking = omits_thinking
        self.done: list[Content] = []
        self._open: Content | None = None  # the open block, without its text
        self._texts: list[str] = []  # pieces of the open block's text

    def take(self, delta: MessageDelta) -> list[TypedEvent]:
        """Return the events that a delta causes."""
        events: list[TypedEvent] = []
        for part in delta.parts:
            if isinstance(part, ToolCallDelta):
                self._take_call(part, events)
            elif part.is_reasoning:
                if not isinstance(self._open, ThinkingContent):
                    self._begin(ThinkingContent(""), events)
                shown = None if self._omits_thinking else ThinkingPiece(part.text)
                self._add(part.text, shown, events)
            else:
                if not isinstance(self._open, TextContent):
                    self._begin(TextContent(""), events)
                self._add(part.text, TextPiece(part.text), events)
        return events

    def _take_call(self, call: ToolCallDelta, events: list[TypedEvent]) -> None:
        if call.name is not None:
            call_id = call.id or f"toolu_{call.index}"
            self._begin(ToolUseContent(call_id, call.name, {}), events)
        if call.arguments:
            self._add(call.arguments, InputPiece(call.arguments), events)

    def close(self) -> list[TypedEvent]:
        """End the open block and return its events."""
        events: list[TypedEvent] = []
        self._end(events)
        return events

    def _begin(self, block: Content, events: list[TypedEvent]) -> None:
        self._end(events)
        self._open = block
        events.append(BlockStart(len(self.done), block))

    def _add(self, text: str, piece: Piece | None, events: list[TypedEvent]) -> None:
        self._texts.append(text)
        if piece is not None:
            events.append(BlockDelta(len(self.done), piece))

    def _end(self, events: list[TypedEvent]) -> None:
        if self._open is None:
            return
        block = self._filled(self._open, "".join(self._texts))
        if isinstance(block, ThinkingContent) and block.signature:
            events.append(BlockDelta(len(self.done), SignaturePiece(block.signature)))
        events.append(BlockStop(len(self.done)))
        self.done.append(block)
        self._open = None
        self._texts.clear()

    def _filled(self, block: Content, text: str) -> Content:
        match block:
            case TextContent():
                return TextContent(text)
            case ThinkingContent() if self._omits_thinking:
                return ThinkingContent("", signature(text))
            case ThinkingContent():
                return ThinkingContent(text)
            case ToolUseContent():
                return msgspec.structs.replace(block, input=_as_object(text))


def _as_object(text: str) -> Any:
    """Return a call's arguments as an object, in the model's own JSON: numbers of any size stay.

    Without a grammar, a model may write any text; what is no object comes under "invalid".
    """
    try:
        is_object = isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        is_object = False
    if is_object:
        return msgspec.Raw(text.encode())
    return {"invalid": text} if text else {}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
