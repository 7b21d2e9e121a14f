"""Reads one tool call out of the text in which a model writes it, as far as that has come."""

import io
import re
import secrets
import string
from collections.abc import Iterator

import msgspec

from legato.text.message_syntax import ToolCallSyntax

_ID_LETTERS = string.ascii_letters + string.digits
_MAX_HEAD_CHARS = 512
"""Up to a call's arguments. Those of a call whose head is longer come whole."""

# None of these patterns can go back over what it has passed, so that each takes linear time.
_STRING = r'"(?:[^"\\]|\\.)++"'
_HEAD = re.compile(
    rf'\{{\s*+(?:"(?:id|type)"\s*+:\s*+{_STRING}\s*+,\s*+)*+'
    rf'"name"\s*+:\s*+({_STRING})\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{{)',
    re.DOTALL,
)
_NAMED_HEAD = r"([^\s\[{]++)(?:%s[^\[{]*+)?%s\s*+(?=\{)"
_FIRST_KEY = re.compile(rf'\{{\s*+({_STRING}|""|[^"\s])', re.DOTALL)
_KEYS = frozenset({'"name"', '"id"', '"type"', '"arguments"', '"parameters"'})
_OUTSIDE_STRINGS = re.compile(r'["{}\[\]]')
_INSIDE_STRINGS = re.compile(r'["\\]')

CallPiece = tuple[str | None, str]
"""The call's name, with its first piece; the next piece of its arguments."""


class _CallObject(msgspec.Struct):
    name: str
    arguments: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class ObjectEnd:
    """Finds where a JSON object ends, whatever pieces it comes in: by its brackets and strings.

    Args:
        depth: of brackets that were open before the text began.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        """Length of what belongs to the object; None where all does, and it goes on."""
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            mark = (_INSIDE_STRINGS if self._in_string else _OUTSIDE_STRINGS).search(text, at)
            if mark is None:
                return None
            at = mark.end()
            if self._ends_with(mark.group()):
                return at
        return None

    def _ends_with(self, mark: str) -> bool:
        if mark == "\\":
            self._is_escaped = True
        elif mark == '"':
            self._in_string = not self._in_string
        elif mark in "{[":
            self._depth += 1
        else:
            self._depth -= 1
        return mark in "}]" and self._depth <= 0


class ToolCallReader:
    """Reads one call, from the first letter of its object, or of its name, on.

    What comes of it does not depend on how the text is cut.

    Attributes:
        rest: the text behind it, once it is over; None before.
        no_call: the text that began like a call and is none, once that is known, like `rest`.
    """

    def __init__(self, syntax: ToolCallSyntax) -> None:
        self.rest: str | None = None
        self.no_call: str | None = None
        self._id_chars = syntax.id_chars
        self._text = io.StringIO()
        self._head = ""
        self._end = ObjectEnd()
        self._named_head = _named_head(syntax) if syntax.name_end else None
        self._read = self._read_name if self._named_head else self._read_object
        self._has_begun = False

    def feed(self, text: str) -> Iterator[CallPiece]:
        """What the text adds to the call. Not to be called once it is over."""
        return self._read(text)

    def new_id(self) -> str:
        if self._id_chars is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(_ID_LETTERS) for _ in range(self._id_chars))

    def close(self) -> None:
        """No more text comes: what has not become a call never does."""
        if self.rest is None and not self._has_begun:
            self._give_up(self._text.tell())

    def _read_name(self, text: str) -> Iterator[CallPiece]:
        assert self._named_head is not None
        self._text.write(text)
        self._head += text
        head = self._named_head.match(self._head)
        if head is not None and head.end() <= _MAX_HEAD_CHARS:
            yield from self._begin(head[1], self._head[head.end() :])
        elif len(self._head) > _MAX_HEAD_CHARS:
            self._give_up(_MAX_HEAD_CHARS)

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
        """Take an object that did not begin as calls do."""
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
        if self._named_head is not None:
            self.rest = text[length:]
            return
        self._end = ObjectEnd(depth=1)
        self._read = self._read_tail
        yield from self._read(text[length:])

    def _read_tail(self, text: str) -> Iterator[CallPiece]:
        """The object's own bracket, which small models forget, or more keys before it."""
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


def _named_head(syntax: ToolCallSyntax) -> re.Pattern[str]:
    marks = (re.escape(syntax.id_begin), re.escape(syntax.name_end))
    return re.compile(_NAMED_HEAD % marks, re.DOTALL)


def _string(literal: str) -> str | None:
    try:
        return msgspec.json.decode(literal, type=str)
    except msgspec.DecodeError:
        return None


def _decoded(text: str) -> CallPiece | None:
    """The call that a JSON text is, if it is one."""
    try:
        call = msgspec.json.decode(text, type=_CallObject)
        arguments = _arguments(call)
    except (msgspec.DecodeError, RecursionError):
        return None
    return (call.name, arguments) if call.name and arguments.startswith("{") else None


def _arguments(call: _CallObject) -> str:
    """They may be left out, be null, or be JSON within a string."""
    raw = call.arguments or call.parameters or b"{}"
    text = bytes(raw).decode()
    if text == "null":
        return "{}"
    return msgspec.json.decode(text, type=str) if text.startswith('"') else text
