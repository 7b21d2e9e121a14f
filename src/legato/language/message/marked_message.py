"""Finds the parts of a message by the marks around them."""

import re
from collections.abc import Callable

from legato.language.message.message_parts import MessageParts
from legato.language.message.message_syntax import (
    JsonCall,
    MessageSyntax,
    NamedCall,
    ToolCallSyntax,
)
from legato.language.message.tool_call import CallReader, JsonCallReader, NamedCallReader
from legato.language.output_text import overlap

_BETWEEN_CALLS = " \t\r\n,;]"
_SPACE = re.compile(r"\s+")


class MarkedMessage:
    """Reads one message into its parts.

    Text that may begin a mark, and space that may precede one, wait for the text after them. Text
    that looked like a call but is none becomes content. A call cut off before its arguments is
    neither.
    """

    def __init__(self, syntax: MessageSyntax, parts: MessageParts) -> None:
        self._syntax = syntax
        self._parts = parts
        self._may_reason = syntax.reasoning is not None
        self._num_fed = 0
        self._held = ""  # possibly the beginning of a mark
        self._opening: list[str] = []  # text of a section that has no call yet
        self._call: CallReader | None = None
        self._may_hold_marks = True
        self._read: Callable[[str], str] = self._read_start
        if syntax.is_reasoning_open:
            self._parts.begin_reasoning(0)
            self._read = self._read_reasoning

    def feed(self, text: str) -> None:
        self._num_fed += len(text)
        self._read_all(self._held + text)

    def _read_all(self, text: str) -> None:
        self._held = ""
        while text:
            text = self._read(text)

    # Each of these methods reads the text's beginning, and returns the rest.

    def _read_start(self, text: str) -> str:
        """Read before anything but space."""
        reasoning, calls = self._syntax.reasoning, self._syntax.tool_calls
        begun = text.lstrip()
        self._parts.content.push(text[: len(text) - len(begun)], self._start(text))
        if self._may_reason and reasoning is not None and begun:
            if begun.startswith(reasoning.begin):
                self._parts.begin_reasoning(self._start(begun))
                self._read = self._read_reasoning
                return begun.removeprefix(reasoning.begin)
            if reasoning.begin.startswith(begun):
                self._held = begun
                return ""
        if calls is not None and calls.is_bare and begun.startswith("{"):
            self._begin_call(calls, is_json=True)
        elif begun:
            self._read = self._read_content
        return begun

    def _read_reasoning(self, text: str) -> str:
        assert self._syntax.reasoning is not None
        passed, rest = self._until(self._syntax.reasoning.end, text)
        self._parts.reasoning.push(passed, self._start(text))
        if rest is None:
            return ""
        self._may_reason = False
        self._parts.end_reasoning(self._start(rest))
        self._parts.content.trim()
        self._read = self._read_start
        return rest

    def _read_content(self, text: str) -> str:
        calls = self._syntax.tool_calls
        if calls is None:
            self._parts.content.push(text, self._start(text))
            self._parts.content.release()
            return ""
        passed, rest = self._until(calls.begin, text)
        self._parts.content.push(passed, self._start(text))
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
        takes_list = isinstance(calls.call, JsonCall) or calls.is_list
        if begun[0] == "[" and takes_list and "[" not in self._opening:
            self._opening.append("[")
            return begun[1:]
        if begun[0] == "{" or isinstance(calls.call, NamedCall):
            self._begin_call(calls, is_json=begun[0] == "{")
        else:
            self._give_up_section("", begun)
        return begun

    def _read_call(self, text: str) -> str:
        assert self._call is not None
        for name, arguments in self._call.feed(text):
            if name is not None:
                self._opening.clear()
                self._parts.begin_call(name, self._call.call_id)
            self._parts.add_arguments(arguments)
        rest = self._call.rest
        if rest is None:
            return ""
        if self._call.no_call is None:
            self._read = self._read_between
        else:
            self._give_up_section(self._call.no_call, rest)
        return rest

    def _read_between(self, text: str) -> str:
        """Read after a call; the section may continue, or end without a mark."""
        calls = self._syntax.tool_calls
        assert calls is not None
        start, begun = self._start(text), text.lstrip(_BETWEEN_CALLS)
        for space in _SPACE.finditer(text, 0, len(text) - len(begun)):  # content may follow
            self._parts.content.push(space[0], start + space.start())
        text = begun
        if text.startswith(calls.begin):
            self._begin_section(calls)
            return text.removeprefix(calls.begin)
        if calls.end and text.startswith(calls.end):
            self._read = self._read_content
            return text.removeprefix(calls.end)
        is_json = isinstance(self._call, JsonCallReader)
        call_begin = calls.call.begin if isinstance(calls.call, NamedCall) else ""
        marks = (calls.begin, calls.end, call_begin)
        if any(mark.startswith(text) and mark != text for mark in marks):
            self._held = text
            return ""
        is_named = calls.is_list or (call_begin != "" and text.startswith(call_begin))
        if text.startswith("{") if is_json else is_named:
            self._begin_call(calls, is_json=is_json)
        else:
            self._read = self._read_content
        return text

    def _begin_section(self, calls: ToolCallSyntax) -> None:
        self._opening = [calls.begin]
        self._read = self._read_opening

    def _begin_call(self, calls: ToolCallSyntax, *, is_json: bool) -> None:
        """Args: is_json: whether it is an object; models of any syntax write some."""
        tools, last = self._syntax.tools, self._call
        if isinstance(last, NamedCallReader):
            self._may_hold_marks = last.may_hold_marks
        if is_json:
            self._call = JsonCallReader(calls.id_chars, tools)
        else:
            self._call = NamedCallReader(calls, tools, may_hold_marks=self._may_hold_marks)
        self._read = self._read_call

    def _give_up_section(self, text: str, rest: str) -> None:
        """Treat the section so far as content, followed by `text`. Args: rest: what is unread."""
        text = "".join(self._opening) + text
        self._parts.content.push(text, self._start(rest) - len(text))
        self._opening.clear()
        self._read = self._read_content

    def _start(self, rest: str) -> int:
        """Return where the unread rest of the text begins in the completion."""
        return self._num_fed - len(rest)

    def _until(self, mark: str, text: str) -> tuple[str, str | None]:
        """Return the text before a mark and after it; None for the latter until the mark comes."""
        passed, found, rest = text.partition(mark)
        if found:
            return passed, rest
        num_held = overlap(text, mark) if mark[0] in text else 0
        passed = text[: len(text) - num_held]
        self._held = text[len(passed) :]
        return passed, None

    def close(self, *, is_cut: bool) -> None:
        """Finish after the last text.

        Args:
            is_cut: whether the model had more to write; what it began to mark is no text then.
        """
        while self._call is not None and self._read == self._read_call:
            self._call.close()
            if self._call.no_call is None:
                self._parts.is_call_cut = is_cut
                return
            is_bare_head = isinstance(self._call, JsonCallReader) and self._call.is_head
            if is_cut and (self._opening or self._parts.num_calls or is_bare_head):
                return
            rest = self._call.rest or ""
            self._give_up_section(self._call.no_call, rest)
            self._read_all(rest)
        if is_cut:
            self._held = ""
        elif self._opening:
            self._give_up_section("", self._held)
        if self._read == self._read_reasoning:
            self._parts.reasoning.push(self._held, self._start(self._held))
        elif self._read in (self._read_start, self._read_content):
            self._parts.content.push(self._held, self._start(self._held))
            if not self._parts.num_calls:
                self._parts.content.release()
