"""The parts of a message, collected from one piece of its text to the next."""

import msgspec

from legato.core.outputs import FinishReason
from legato.language.message.tool_call import new_call_id

TOOL_CALLS = "tool_calls"
"""The finish reason of a message that ends with tool calls."""


class TextSpan(msgspec.Struct, frozen=True, gc=False):
    """A new piece of a message's content or reasoning.

    Attributes:
        start: where it begins in the completion's text, in characters.
    """

    text: str
    start: int
    is_reasoning: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.text)


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


MessagePart = TextSpan | ToolCallDelta


class MessageDelta(msgspec.Struct, frozen=True, gc=False):
    """New parts of a message, in the order in which the model wrote them.

    Attributes:
        finish_reason: as of a `CompletionDelta`, or `TOOL_CALLS` if it ends with whole calls.
    """

    parts: tuple[MessagePart, ...]
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        return self._text(is_reasoning=False)

    @property
    def reasoning(self) -> str:
        return self._text(is_reasoning=True)

    @property
    def tool_calls(self) -> list[ToolCallDelta]:
        return [part for part in self.parts if isinstance(part, ToolCallDelta)]

    def _text(self, *, is_reasoning: bool) -> str:
        spans = [part for part in self.parts if isinstance(part, TextSpan)]
        return "".join([span.text for span in spans if span.is_reasoning == is_reasoning])


class MessageParts:
    """Collects a message's parts until they are taken as a delta.

    Attributes:
        content: space before a call is left out at a message's beginning and end.
        reasoning: without the space around it.
        reasoning_spans: where reasoning begins and ends in the completion's text, marks included;
            None for the end of one that is open.
        num_calls: calls that have begun.
        is_call_cut: whether the last one was cut off.
    """

    def __init__(self) -> None:
        self._ready: list[MessagePart] = []
        self.content = SpacedText(self._ready)
        self.reasoning = SpacedText(self._ready, is_reasoning=True)
        self.reasoning_spans: list[tuple[int, int | None]] = []
        self.num_calls = 0
        self.is_call_cut = False
        self._call_ids: set[str] = set()

    def begin_reasoning(self, start: int) -> None:
        self.reasoning_spans.append((start, None))

    def end_reasoning(self, end: int) -> None:
        start, _ = self.reasoning_spans.pop()
        self.reasoning_spans.append((start, end))

    def begin_call(self, name: str, call_id: str) -> None:
        """Args: call_id: as the model wrote it or as made for it; one given twice is replaced."""
        if call_id in self._call_ids:
            call_id = new_call_id()
        self._call_ids.add(call_id)
        self.content.interrupt()
        self._ready.append(ToolCallDelta(self.num_calls, call_id, name, ""))
        self.num_calls += 1

    def add_arguments(self, arguments: str) -> None:
        """Add to the arguments of the last call."""
        if not arguments:
            return
        last = self._ready[-1] if self._ready else None
        if isinstance(last, ToolCallDelta):
            arguments = last.arguments + arguments
            self._ready[-1] = msgspec.structs.replace(last, arguments=arguments)
        else:
            self._ready.append(ToolCallDelta(self.num_calls - 1, None, None, arguments))

    def taken(self, finish_reason: FinishReason | None) -> MessageDelta:
        """Return the new parts, once. Args: finish_reason: set with the last text."""
        is_whole = finish_reason is FinishReason.STOP and not self.is_call_cut
        calls_tools = is_whole and self.num_calls > 0
        delta = MessageDelta(tuple(self._ready), TOOL_CALLS if calls_tools else finish_reason)
        self._ready.clear()
        return delta


class SpacedText:
    """Passes text on up to its last letter; trailing space waits for more text.

    Args:
        ready: gets the spans of text.
        is_reasoning: whether the text is reasoning, which has no space before its first letter.
    """

    def __init__(self, ready: list[MessagePart], *, is_reasoning: bool = False) -> None:
        self._ready = ready
        self._is_reasoning = is_reasoning
        self._is_trimmed = is_reasoning  # whether the space before the next letter is left out
        self._has_letters = False
        self._waiting: list[tuple[int, list[str]]] = []  # start and pieces of a span each
        self._waiting_end = 0

    def push(self, text: str, start: int) -> None:
        """Args: start: where the text begins in the completion, in characters."""
        if self._is_trimmed:
            begun = text.lstrip()
            text, start = begun, start + len(text) - len(begun)
        letters = text.rstrip()
        if letters:
            self._is_trimmed, self._has_letters = False, True
            self.release()
            self._pass(letters, start)
        if len(letters) < len(text):
            self._wait(text[len(letters) :], start + len(letters))

    def trim(self) -> None:
        """Drop the waiting space, and the space before the next letter."""
        self._is_trimmed = True
        self._waiting.clear()

    def interrupt(self) -> None:
        """Let a part of another kind come between: text on both sides keeps one space of two."""
        if self._has_letters:
            self._is_trimmed = bool(self._waiting)
        else:
            self.trim()

    def release(self) -> None:
        """Pass the waiting space on."""
        for start, pieces in self._waiting:
            self._pass("".join(pieces), start)
        self._waiting.clear()

    def _wait(self, space: str, start: int) -> None:
        if not self._waiting or start != self._waiting_end:
            self._waiting.append((start, []))
        self._waiting[-1][1].append(space)
        self._waiting_end = start + len(space)

    def _pass(self, text: str, start: int) -> None:
        last = self._ready[-1] if self._ready else None
        if (
            isinstance(last, TextSpan)
            and last.is_reasoning == self._is_reasoning
            and last.end == start
        ):
            self._ready[-1] = TextSpan(last.text + text, last.start, self._is_reasoning)
        else:
            self._ready.append(TextSpan(text, start, self._is_reasoning))
