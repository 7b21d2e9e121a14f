"""From a completion's text to an assistant's message: content, reasoning and tool calls."""

import msgspec

from legato.engine.frontend.completion import Completion, CompletionDelta
from legato.model.message_syntax import MessageSyntax


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """What is new of one tool call.

    Attributes:
        index: of the call in its message, from 0.
        id, name: on a call's first delta only.
        arguments: the next piece of a JSON text.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


class MessageDelta(msgspec.Struct, frozen=True, gc=False):
    """What is new of a message; all but `finish_reason` may be empty.

    Attributes:
        finish_reason: as of `CompletionDelta`, or "tool_calls" where a message with calls stops.
    """

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    finish_reason: str | None = None


class ToolCall(msgspec.Struct, frozen=True):
    """Attributes: `arguments` is a JSON text, as the model wrote it: valid or not."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True):
    """A whole message.

    Attributes:
        content: None where the model wrote nothing but reasoning or calls.
        reasoning: None where it did not reason.
        finish_reason: as of `MessageDelta`.
    """

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str | None


class MessageReader:
    """Reads one completion, a delta at a time; what it gives does not depend on how it is cut.

    Args:
        syntax: `Generation.message_syntax`; None where all text is content.
    """

    def __init__(self, syntax: MessageSyntax | None) -> None:
        self._syntax = syntax

    def feed(self, delta: CompletionDelta) -> MessageDelta:
        """What the delta adds to the message."""
        return self.feed_text(delta.text, delta.finish_reason)

    def feed_text(self, text: str, finish_reason: str | None) -> MessageDelta:
        """Args: finish_reason: set with the last text."""
        return MessageDelta(text, finish_reason=finish_reason)


def read_message(completion: Completion, syntax: MessageSyntax | None) -> Message:
    """The message that a whole completion is."""
    delta = MessageReader(syntax).feed_text(completion.text, completion.finish_reason)
    return Message(delta.content, delta.reasoning or None, (), delta.finish_reason)
