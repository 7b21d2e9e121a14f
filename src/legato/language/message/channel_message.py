"""Finds the parts of a message in harmony, the format of gpt-oss: each on a channel."""

import re
from collections.abc import Callable

from legato.language.message.argument_reader import MarkFinder
from legato.language.message.message_parts import MessageParts
from legato.language.message.message_syntax import Channels, MessageSyntax
from legato.language.message.tool_call import new_call_id

_MAX_HEADER_CHARS = 512
_REASONING = "analysis"
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")
_FUNCTIONS = "functions."


class ChannelMessage:
    """Reads one message, from the text after `<|start|>assistant`, into its parts.

    A part for a function is a call; one on the channel "analysis" is reasoning, as is one for
    another recipient, a tool that the model knows from its training; the rest is content. A header
    that breaks off is nothing. A text without one is content.
    """

    def __init__(self, syntax: MessageSyntax, marks: Channels, parts: MessageParts) -> None:
        self._marks = marks
        self._syntax = syntax
        self._parts = parts
        self._num_fed = 0
        self._header = ""
        self._is_begun = False  # whether a call has arguments
        self._push: Callable[[str, int], None] = self._parts.content.push
        self._end = MarkFinder(*marks.ends)
        self._read: Callable[[str], str] = self._read_start

    def feed(self, text: str) -> None:
        self._num_fed += len(text)
        while text:
            text = self._read(text)

    def close(self, *, is_cut: bool) -> None:
        """Finish after the last text.

        Args:
            is_cut: whether the model had more to write; then what may begin a mark is none.
        """
        if self._read == self._read_start and not is_cut:
            self._parts.content.push(self._header, self._start(self._header))
        elif self._read == self._read_body and not is_cut:
            held = self._end.flush()
            self._push(held, self._start(held))
            self._end_body()
        elif self._push == self._push_arguments:
            self._parts.is_call_cut = self._read == self._read_body
        if self._push == self._parts.content.push and not self._parts.num_calls:
            self._parts.content.release()

    # Each of these methods reads the text's beginning, and returns the rest.

    def _read_start(self, text: str) -> str:
        """Read until it is known whether the message has a header."""
        text, self._header = self._header + text, ""
        begun = text.lstrip()
        marks = (self._marks.channel, self._marks.start, "to=", self._marks.constrain)
        if any(begun.startswith(mark) for mark in marks):
            self._read = self._read_header
        elif any(mark.startswith(begun) for mark in marks):
            self._header = text
            return ""
        else:
            self._begin_body("")
        return text

    def _read_header(self, text: str) -> str:
        text, self._header = self._header + text, ""
        header, found, rest = text.partition(self._marks.message)
        if found and len(header) <= _MAX_HEADER_CHARS:
            self._begin_body(header, self._start(text))
            return rest
        if not found and len(text) <= _MAX_HEADER_CHARS + len(self._marks.message):
            self._header = text
            return ""
        self._begin_body("")
        self._parts.content.push(text[:_MAX_HEADER_CHARS], self._start(text))
        return text[_MAX_HEADER_CHARS:]

    def _read_body(self, text: str) -> str:
        start = self._start(text) - self._end.num_held
        self._push(self._end.feed(text), start)
        if self._end.found is None:
            return ""
        self._end_body()
        begins_next = self._end.found in (self._marks.start, self._marks.channel)
        rest = (self._end.found if begins_next else "") + self._end.rest
        if self._push == self._parts.reasoning.push:
            self._parts.end_reasoning(self._start(rest))
        self._read = self._read_start
        return rest

    def _begin_body(self, header: str, start: int = 0) -> None:
        """Args: start: where the header begins in the completion, in characters."""
        channel = header.partition(self._marks.channel)[2].lstrip()
        recipient = (_RECIPIENT.search(header) or [""])[0].removeprefix("to=")
        self._end = MarkFinder(*self._marks.ends)
        self._read = self._read_body
        name = recipient.removeprefix(_FUNCTIONS)
        is_function = name != recipient
        tools = self._syntax.tools
        if is_function and self._syntax.is_calling and (tools is None or name in tools):
            self._parts.begin_call(name, new_call_id())
            self._is_begun = False
            self._push = self._push_arguments
        elif (recipient and not is_function) or channel.startswith(_REASONING):
            self._push = self._parts.reasoning.push
            self._parts.begin_reasoning(start)
        else:
            self._push = self._parts.content.push

    def _end_body(self) -> None:
        if self._push == self._push_arguments and not self._is_begun:
            self._parts.add_arguments("{}")

    def _push_arguments(self, text: str, _start: int) -> None:
        if not self._is_begun:
            text = text.lstrip()
        self._is_begun = self._is_begun or text != ""
        self._parts.add_arguments(text)

    def _start(self, rest: str) -> int:
        """Return where the unread rest of the text begins in the completion."""
        return self._num_fed - len(rest)
