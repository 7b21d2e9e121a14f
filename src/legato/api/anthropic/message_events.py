"""Anthropic's message, and the events of a streamed one."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from legato.api.answer import LegatoNotes, NotedAnswer
from legato.api.anthropic.context_edits import AppliedEdit
from legato.api.http.bodies import TypedEvent

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


class Ping(TypedEvent, frozen=True, tag="ping"):
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


class MessageDelta(TypedEvent, frozen=True, tag="message_delta"):
    """Attributes: `usage`, `context_management` and `legato` are the whole message's."""

    delta: MessageChange
    usage: MessageUsage
    context_management: ContextEdits | UnsetType = UNSET
    legato: LegatoNotes | UnsetType = UNSET


class MessageStop(TypedEvent, frozen=True, tag="message_stop"):
    """The last event."""
