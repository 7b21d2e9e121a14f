"""Reads a tool call that is a JSON object of a name and its arguments, piece by piece."""

import io
import re
from collections.abc import Iterator

import msgspec

from legato.engine.frontend.argument_reader import ObjectEnd
from legato.engine.frontend.tool_call import CallPiece, new_call_id

_MAX_HEAD_CHARS = 512
"""Longest head of a call that is streamed. After a longer head, the call comes whole."""

# No backtracking in these patterns, so that each takes linear time.
_STRING = r'"(?:[^"\\]|\\.)++"'
_HEAD = re.compile(
    rf'\{{\s*+(?:"(?:id|type)"\s*+:\s*+{_STRING}\s*+,\s*+)*+'
    rf'"name"\s*+:\s*+({_STRING})\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{{)',
    re.DOTALL,
)
_FIRST_KEY = re.compile(rf'\{{\s*+({_STRING}|""|[^"\s])', re.DOTALL)
_KEYS = frozenset({'"name"', '"id"', '"type"', '"arguments"', '"parameters"'})


class _CallObject(msgspec.Struct):
    name: str
    arguments: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class JsonCallReader:
    """Reads one call from the first bracket of its object, as `CallReader`.

    Args:
        id_chars: length of the call's id; None for one of the engine's own form.
    """

    def __init__(self, id_chars: int | None) -> None:
        self.rest: str | None = None
        self.no_call: str | None = None
        self.call_id = new_call_id(id_chars)
        self._text = io.StringIO()
        self._head = ""
        self._end = ObjectEnd()
        self._read = self._read_object
        self._has_begun = False

    def feed(self, text: str) -> Iterator[CallPiece]:
        """Yield the call's new pieces. Must not be called after its end."""
        return self._read(text)

    def close(self) -> None:
        """Finish after the last text; an incomplete call is none."""
        if self.rest is None and not self._has_begun:
            self._give_up(self._text.tell())

    def _read_object(self, text: str) -> Iterator[CallPiece]:
        self._text.write(text)
        if len(self._head) <= _MAX_HEAD_CHARS:
            self._head += text
            head = _HEAD.match(self._head)
            if head is not None and head.end() <= _MAX_HEAD_CHARS and (name := _string(head[1])):
                yield from self._begin(name, self._head[head.end() :])
                return
            key = _FIRST_KEY.match(self._head)
            if key is not None and key.end() <= _MAX_HEAD_CHARS and key[1] not in _KEYS:
                self._give_up(key.end())
                return
        length = self._end.find(text)
        if length is not None:
            yield from self._take_whole(self._text.tell() - len(text) + length)

    def _take_whole(self, length: int) -> Iterator[CallPiece]:
        """Parse a whole object that did not begin like a call."""
        call = _decoded(self._text.getvalue()[:length])
        if call is None:
            self._give_up(length)
            return
        self._has_begun = True
        self.rest = self._text.getvalue()[length:]
        yield call

    def _begin(self, name: str, text: str) -> Iterator[CallPiece]:
        self._has_begun = True
        self._end = ObjectEnd()
        self._read = self._read_arguments
        yield name, ""
        yield from self._read(text)

    def _read_arguments(self, text: str) -> Iterator[CallPiece]:
        length = self._end.find(text)
        if text:
            yield None, text[:length]
        if length is None:
            return
        self._end = ObjectEnd(depth=1)
        self._read = self._read_tail
        yield from self._read(text[length:])

    def _read_tail(self, text: str) -> Iterator[CallPiece]:
        """Read the object's closing bracket, which small models forget, or further keys."""
        text = text.lstrip()
        if text.startswith((",", "}")):
            self._read = self._read_keys
            yield from self._read(text)
        elif text:
            self.rest = text

    def _read_keys(self, text: str) -> Iterator[CallPiece]:
        length = self._end.find(text)
        if length is not None:
            self.rest = text[length:]
        yield from ()

    def _give_up(self, length: int) -> None:
        text = self._text.getvalue()
        self.no_call, self.rest = text[:length], text[length:]


def _string(literal: str) -> str | None:
    try:
        return msgspec.json.decode(literal, type=str)
    except msgspec.DecodeError:
        return None


def _decoded(text: str) -> CallPiece | None:
    """Return the call in a JSON text; None if it is not one."""
    try:
        call = msgspec.json.decode(text, type=_CallObject)
        arguments = _arguments(call)
    except (msgspec.DecodeError, RecursionError):
        return None
    return (call.name, arguments) if call.name and arguments.startswith("{") else None


def _arguments(call: _CallObject) -> str:
    """Return the arguments in JSON; a model may omit them, or write null or JSON in a string."""
    raw = call.arguments or call.parameters or b"{}"
    text = bytes(raw).decode()
    if text == "null":
        return "{}"
    return msgspec.json.decode(text, type=str) if text.startswith('"') else text
