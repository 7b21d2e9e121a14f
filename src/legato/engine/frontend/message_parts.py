"""The parts of a message, collected from one piece of its text to the next."""

import msgspec

from legato.core.outputs import FinishReason
from legato.engine.frontend.tool_call import new_call_id

TOOL_CALLS = "tool_calls"
"""The finish reason of a message that ends with tool calls."""


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """A new piece of one tool call.

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
    """New parts of a message; all but `finish_reason` may be empty.

    Attributes:
        finish_reason: as of a `CompletionDelta`, or `TOOL_CALLS` if a message ends with calls.
    """

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    finish_reason: str | None = None


class MessageParts:
    """Collects a message's parts until they are taken as a delta.

    Attributes:
        content: space before a call is left out.
        reasoning: without the space around it.
        num_calls: calls that have begun.
    """

    def __init__(self) -> None:
        self.content = SpacedText(is_trimmed=False)
        self.reasoning = SpacedText(is_trimmed=True)
        self.num_calls = 0
        self._calls: list[ToolCallDelta] = []
        self._call_ids: set[str] = set()

    def begin_call(self, name: str, call_id: str) -> None:
        """Args: call_id: as the model wrote it or as made for it; one given twice is replaced."""
        if call_id in self._call_ids:
            call_id = new_call_id()
        self._call_ids.add(call_id)
        self.content.trim()
        self._calls.append(ToolCallDelta(self.num_calls, call_id, name, ""))
        self.num_calls += 1

    def add_arguments(self, arguments: str) -> None:
        """Add to the arguments of the last call."""
        if not arguments:
            return
        last = self.num_calls - 1
        if self._calls and self._calls[-1].index == last:
            before = self._calls.pop()
            piece = ToolCallDelta(last, before.id, before.name, before.arguments + arguments)
        else:
            piece = ToolCallDelta(last, None, None, arguments)
        self._calls.append(piece)

    def taken(self, finish_reason: FinishReason | None) -> MessageDelta:
        """Return the new parts, once. Args: finish_reason: set with the last text."""
        calls_tools = finish_reason is FinishReason.STOP and self.num_calls > 0
        delta = MessageDelta(
            self.content.taken(),
            self.reasoning.taken(),
            tuple(self._calls),
            TOOL_CALLS if calls_tools else finish_reason,
        )
        self._calls.clear()
        return delta


class SpacedText:
    """Passes text on up to its last letter; trailing space waits for more text.

    Args:
        is_trimmed: whether the space before its first letter is left out.
    """

    def __init__(self, *, is_trimmed: bool) -> None:
        self._is_trimmed = is_trimmed
        self._waiting: list[str] = []
        self._ready: list[str] = []

    def push(self, text: str) -> None:
        if self._is_trimmed:
            text = text.lstrip()
        letters = text.rstrip()
        if letters:
            self._is_trimmed = False
            self.release()
            self._ready.append(letters)
        if len(letters) < len(text):
            self._waiting.append(text[len(letters) :])

    def trim(self) -> None:
        """Drop the waiting space, and the space before the next letter."""
        self._is_trimmed = True
        self._waiting.clear()

    def release(self) -> None:
        """Pass the waiting space on."""
        self._ready += self._waiting
        self._waiting.clear()

    def taken(self) -> str:
        """Return the text that is ready, once."""
        text = "".join(self._ready)
        self._ready.clear()
        return text
