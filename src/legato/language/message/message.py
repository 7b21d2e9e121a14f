"""Parses a completion's text into an assistant's message: content, reasoning and tool calls."""

from collections.abc import Sequence

import msgspec

from legato.core.outputs import FinishReason
from legato.language.message.channel_message import ChannelMessage
from legato.language.message.marked_message import MarkedMessage
from legato.language.message.message_parts import (
    TOOL_CALLS,
    MessageDelta,
    MessagePart,
    MessageParts,
    TextSpan,
    ToolCallDelta,
)
from legato.language.message.message_syntax import MessageSyntax

__all__ = [
    "TOOL_CALLS",
    "Message",
    "MessageDelta",
    "MessagePart",
    "MessageReader",
    "TextSpan",
    "ToolCall",
    "ToolCallDelta",
    "read_message",
]

_PIECE_CHARS = 1024
"""A whole completion is read in pieces of this size: each mark copies the rest of a piece."""


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool.

    Attributes:
        id: made for the call; the tool's result refers to it.
        arguments: a JSON text, as the model wrote it: valid or not.
    """

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True):
    """A whole message of an assistant.

    Attributes:
        content: None if the model wrote only reasoning or calls.
        reasoning: None if it did not reason.
        finish_reason: as of the completion, or "tool_calls" if it ends with whole calls.
    """

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str | None


class MessageReader:
    """Parses one completion, piece by piece; the result does not depend on the pieces.

    Args:
        syntax: of the text after the prompt; None if all text is content.
    """

    def __init__(self, syntax: MessageSyntax | None) -> None:
        self._num_chars = 0
        self._reader: MarkedMessage | ChannelMessage | None = None
        if syntax is None:
            return
        self._parts = MessageParts()
        if syntax.channels is not None:
            self._reader = ChannelMessage(syntax, syntax.channels, self._parts)
        else:
            self._reader = MarkedMessage(syntax, self._parts)

    def feed(
        self, text: str, finish_reason: FinishReason | None, stop_reason: int | str | None = None
    ) -> MessageDelta:
        """Return the message's new parts.

        Args:
            finish_reason, stop_reason: as of a `CompletionDelta`, with the last text.
        """
        if self._reader is None:
            span = TextSpan(text, self._num_chars)
            self._num_chars += len(text)
            return MessageDelta((span,) if text else (), finish_reason)
        self._reader.feed(text)
        if finish_reason is not None:
            is_ended = finish_reason is FinishReason.STOP and stop_reason is None
            self._reader.close(is_cut=not is_ended)
        return self._parts.taken(finish_reason)

    @property
    def reasoning_spans(self) -> Sequence[tuple[int, int | None]]:
        """Where reasoning begins and ends in the text so far, as of `MessageParts`."""
        return () if self._reader is None else self._parts.reasoning_spans


def read_message(
    text: str,
    finish_reason: FinishReason | None,
    syntax: MessageSyntax | None,
    stop_reason: int | str | None = None,
) -> Message:
    """Parse a whole completion into a message. Args: as of `MessageReader`."""
    reader = MessageReader(syntax)
    pieces = [text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS)] or [""]
    deltas = [reader.feed(piece, None) for piece in pieces]
    deltas.append(reader.feed("", finish_reason, stop_reason))
    calls = _joined([call for delta in deltas for call in delta.tool_calls])
    content = "".join(delta.content for delta in deltas)
    reasoning = "".join(delta.reasoning for delta in deltas)
    is_content_only = not calls and not reasoning
    return Message(
        content if content or is_content_only else None,
        reasoning or None,
        calls,
        deltas[-1].finish_reason,
    )


def _joined(deltas: list[ToolCallDelta]) -> tuple[ToolCall, ...]:
    calls: list[tuple[ToolCallDelta, list[str]]] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append((delta, []))
        calls[-1][1].append(delta.arguments)
    return tuple(
        ToolCall(first.id or "", first.name or "", "".join(arguments)) for first, arguments in calls
    )
