"""Parses one tool call from a model's text, piece by piece."""

import io
import re
import secrets
import string
from collections.abc import Iterator

import msgspec

from legato.text.message_syntax import ToolCallSyntax

_ID_LETTERS = string.ascii_letters + string.digits
_MAX_HEAD_CHARS = 512
"""Longest head of a call that is streamed. After a longer head, the call comes whole."""

# No backtracking in these patterns, so that each takes linear time.
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
"""The call's name, in the first piece; then pieces of its arguments."""


class _CallObject(msgspec.Struct):
    name: str
    arguments: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class ObjectEnd:
    """Finds the end of a JSON object, in pieces, by its brackets and strings.

    Args:
        depth: of brackets that were open before the text began.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        """Return how much of the text belongs to the object; None if all does and it continues."""
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
    """Parses one call, from the first letter of its object or of its name.

    The result does not depend on how the text is cut.

    Attributes:
        rest: the text after the call; None until it ends.
        no_call: the text that began like a call but is none; set together with `rest`.
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
        """Yield the call's new pieces. Must not be called after its end."""
        return self._read(text)

    def new_id(self) -> str:
        if self._id_chars is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(_ID_LETTERS) for _ in range(self._id_chars))

    def close(self) -> None:
        """Finish after the last text; an incomplete call is none."""
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
        if self._named_head is not None:
            self.rest = text[length:]
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


def _named_head(syntax: ToolCallSyntax) -> re.Pattern[str]:
    marks = (re.escape(syntax.id_begin), re.escape(syntax.name_end))
    return re.compile(_NAMED_HEAD % marks, re.DOTALL)


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
