"""Parses a completion's text into an assistant's message: content, reasoning and tool calls."""

import msgspec

from legato.core.outputs import FinishReason
from legato.engine.frontend.output_text import overlap
from legato.engine.frontend.spaced_text import SpacedText
from legato.engine.frontend.tool_call import ToolCallReader
from legato.text.message_syntax import MessageSyntax, ToolCallSyntax

TOOL_CALLS = "tool_calls"
"""The finish reason of a message that ends with tool calls."""

_BETWEEN_CALLS = " \t\r\n,;]"
_PIECE_CHARS = 1024
"""A whole completion is read in pieces of this size: each mark copies the rest of a piece."""


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
        finish_reason: as of the completion, or "tool_calls" if a message ends with calls.
    """

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str | None


class MessageReader:
    """Parses one completion, piece by piece; the result does not depend on the pieces.

    Text that may begin a mark, and space that may precede one, wait for the text after them. Text
    that looked like a call but is none becomes content.

    Args:
        syntax: of the text after the prompt; None if all text is content.
    """

    def __init__(self, syntax: MessageSyntax | None) -> None:
        self._is_plain = syntax is None
        self._syntax = syntax or MessageSyntax()
        self._may_reason = self._syntax.reasoning is not None
        self._held = ""  # possibly the beginning of a mark
        self._content = SpacedText(is_trimmed=False)
        self._reasoning = SpacedText(is_trimmed=True)
        self._opening: list[str] = []  # text of a section that has no call yet
        self._call: ToolCallReader | None = None
        self._calls: list[ToolCallDelta] = []  # not returned yet
        self._num_calls = 0
        self._read = self._read_reasoning if self._syntax.is_reasoning_open else self._read_start

    def feed(self, text: str, finish_reason: FinishReason | None) -> MessageDelta:
        """Return the message's new parts. Args: finish_reason: set with the last text."""
        if self._is_plain:
            return MessageDelta(text, finish_reason=finish_reason)
        text, self._held = self._held + text, ""
        while text:
            text = self._read(text)
        if finish_reason is not None:
            self._close()
        return self._taken(finish_reason)

    def _taken(self, finish_reason: FinishReason | None) -> MessageDelta:
        calls_tools = finish_reason is FinishReason.STOP and self._num_calls > 0
        delta = MessageDelta(
            self._content.taken(),
            self._reasoning.taken(),
            tuple(self._calls),
            TOOL_CALLS if calls_tools else finish_reason,
        )
        self._calls.clear()
        return delta

    # Each of these methods reads the text's beginning, and returns the rest.

    def _read_start(self, text: str) -> str:
        """Read before anything but space."""
        reasoning, calls = self._syntax.reasoning, self._syntax.tool_calls
        begun = text.lstrip()
        self._content.push(text[: len(text) - len(begun)])
        if self._may_reason and reasoning is not None and begun:
            if begun.startswith(reasoning.begin):
                self._read = self._read_reasoning
                return begun.removeprefix(reasoning.begin)
            if reasoning.begin.startswith(begun):
                self._held = begun
                return ""
        if calls is not None and calls.is_bare and begun.startswith("{"):
            self._begin_call(calls)
        elif begun:
            self._read = self._read_content
        return begun

    def _read_reasoning(self, text: str) -> str:
        assert self._syntax.reasoning is not None
        passed, rest = self._until(self._syntax.reasoning.end, text)
        self._reasoning.push(passed)
        if rest is None:
            return ""
        self._may_reason = False
        self._content.trim()
        self._read = self._read_start
        return rest

    def _read_content(self, text: str) -> str:
        calls = self._syntax.tool_calls
        if calls is None:
            self._content.push(text)
            self._content.release()
            return ""
        passed, rest = self._until(calls.begin, text)
        self._content.push(passed)
        if rest is None:
            return ""
        self._begin_section(calls)
        return rest

    def _read_opening(self, text: str) -> str:
        """Read between a section's mark and its first call."""
        calls = self._syntax.tool_calls
        assert calls is not None
        begun = text.lstrip()
        self._opening.append(text[: len(text) - len(begun)])
        if not begun:
            return ""
        if begun[0] == "[" and not calls.name_end and "[" not in self._opening:
            self._opening.append("[")
            return begun[1:]
        if (begun[0] == "{") != bool(calls.name_end):
            self._begin_call(calls)
        else:
            self._give_up_section("")
        return begun

    def _read_call(self, text: str) -> str:
        assert self._call is not None
        for name, arguments in self._call.feed(text):
            self._add(name, arguments)
        rest = self._call.rest
        if rest is None:
            return ""
        if self._call.no_call is None:
            self._read = self._read_between
        else:
            self._give_up_section(self._call.no_call)
        return rest

    def _read_between(self, text: str) -> str:
        """Read after a call; the section may continue, or end without a mark."""
        calls = self._syntax.tool_calls
        assert calls is not None
        text = text.lstrip(_BETWEEN_CALLS)
        if text.startswith(calls.begin):
            self._begin_section(calls)
            return text.removeprefix(calls.begin)
        if calls.end and text.startswith(calls.end):
            self._read = self._read_content
            return text.removeprefix(calls.end)
        if calls.begin.startswith(text) or calls.end.startswith(text):
            self._held = text
            return ""
        if text.startswith("{") and not calls.name_end:
            self._begin_call(calls)
        else:
            self._read = self._read_content
        return text

    def _begin_section(self, calls: ToolCallSyntax) -> None:
        self._opening = [calls.begin]
        self._read = self._read_opening

    def _begin_call(self, calls: ToolCallSyntax) -> None:
        self._call = ToolCallReader(calls)
        self._read = self._read_call

    def _give_up_section(self, text: str) -> None:
        """Treat the section so far as content, followed by `text`."""
        self._content.push("".join(self._opening) + text)
        self._opening.clear()
        self._read = self._read_content

    def _add(self, name: str | None, arguments: str) -> None:
        """Add a piece of a call to the pieces of this delta."""
        if name is not None:
            self._content.trim()
            self._opening.clear()
            assert self._call is not None
            self._calls.append(ToolCallDelta(self._num_calls, self._call.new_id(), name, arguments))
            self._num_calls += 1
            return
        last = self._num_calls - 1
        if self._calls and self._calls[-1].index == last:
            before = self._calls.pop()
            piece = ToolCallDelta(last, before.id, before.name, before.arguments + arguments)
        else:
            piece = ToolCallDelta(last, None, None, arguments)
        self._calls.append(piece)

    def _until(self, mark: str, text: str) -> tuple[str, str | None]:
        """Return the text before a mark and after it; None for the latter until the mark comes."""
        passed, found, rest = text.partition(mark)
        if found:
            return passed, rest
        num_held = overlap(text, mark) if mark[0] in text else 0
        passed = text[: len(text) - num_held]
        self._held = text[len(passed) :]
        return passed, None

    def _close(self) -> None:
        """Finish after the last text."""
        if self._read == self._read_reasoning:
            self._reasoning.push(self._held)
            return
        if self._call is not None and self._read == self._read_call:
            self._call.close()
            if self._call.no_call is not None:
                self._give_up_section(self._call.no_call)
        if self._opening:
            self._give_up_section("")
        self._content.push(self._held)
        if not self._num_calls:
            self._content.release()


def read_message(
    text: str, finish_reason: FinishReason | None, syntax: MessageSyntax | None
) -> Message:
    """Parse a whole completion into a message."""
    reader = MessageReader(syntax)
    pieces = [text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS)] or [""]
    deltas = [reader.feed(piece, None) for piece in pieces]
    deltas.append(reader.feed("", finish_reason))
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
