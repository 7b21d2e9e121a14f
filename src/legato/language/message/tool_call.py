"""Readers of one tool call, piece by piece: a JSON object, or a name followed by arguments."""

import io
import re
import secrets
import string
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Protocol

import msgspec

from legato.language.message.argument_formats import LiteralArguments
from legato.language.message.argument_reader import ArgumentReader, JsonArguments, ObjectEnd
from legato.language.message.message_syntax import (
    ArgumentTags,
    NamedCall,
    ToolCallSyntax,
    ToolParameters,
)
from legato.language.message.tagged_arguments import TaggedArguments

CallPiece = tuple[str | None, str]
"""The call's name, in the first piece; then pieces of its arguments."""

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
_FIRST_KEY = re.compile(rf'\{{\s*+({_STRING}|""|[^"\s])', re.DOTALL)
_KEYS = frozenset({'"name"', '"id"', '"type"', '"arguments"', '"parameters"'})

_MAX_NAMED_HEAD_CHARS = 512
_SPACE = r"\s*+"
_NAME = r"(?P<name>[\w.-]++)"
_ID = r"(?P<id>[\w-]++)"
_KEYWORD = (r"\(", _SPACE, r"[^\W\d]\w*+", _SPACE, "=")
_NO_KEYWORDS = (r"\(", _SPACE, r"\)")
_NO_PARAMETERS = ToolParameters()


class CallReader(Protocol):
    """Reads one call. How the text is cut makes no difference.

    Attributes:
        rest: the text after the call; None until it ends.
        no_call: the text that began like a call but is none; set together with `rest`.
        call_id: the call's id, from its first piece on.
    """

    rest: str | None
    no_call: str | None
    call_id: str

    def feed(self, text: str) -> Iterator[CallPiece]:
        """Yield the call's new pieces. Must not be called after its end."""

    def close(self) -> None:
        """Finish after the last text; an incomplete call is none."""


def new_call_id(num_chars: int | None = None) -> str:
    """Args: num_chars: letters and digits that a chat template requires; None for any id."""
    if num_chars is None:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(num_chars))


class _CallObject(msgspec.Struct):
    name: str
    arguments: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class JsonCallReader:
    """Reads one call from the first bracket of its object, as `CallReader`.

    Args:
        id_chars: length of the call's id; None for one of the engine's own form.
        names: of the tools that may be called; None if any name may be one.
    """

    def __init__(self, id_chars: int | None, names: Collection[str] | None) -> None:
        self.rest: str | None = None
        self.no_call: str | None = None
        self.call_id = new_call_id(id_chars)
        self._names = names
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

    @property
    def is_head(self) -> bool:
        """Whether the text so far begins a call of a tool that may be called."""
        if self._text.tell() > _MAX_HEAD_CHARS:
            return False
        text = "".join(self._text.getvalue().split())
        return any(
            f'{{{kind}"name":"{name}","{key}":'.startswith(text)
            for kind in ("", '"type":"function",')
            for name in (("",) if self._names is None else self._names)
            for key in ("arguments", "parameters")
        )

    def _read_object(self, text: str) -> Iterator[CallPiece]:
        self._text.write(text)
        if len(self._head) <= _MAX_HEAD_CHARS:
            self._head += text
            head = _HEAD.match(self._head)
            if head is not None and head.end() <= _MAX_HEAD_CHARS and (name := _string(head[1])):
                if self._is_offered(name):
                    yield from self._begin(name, self._head[head.end() :])
                else:
                    self._give_up(head.end())
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
        if call is None or not self._is_offered(call[0] or ""):
            self._give_up(length)
            return
        self._has_begun = True
        self.rest = self._text.getvalue()[length:]
        yield call

    def _is_offered(self, name: str) -> bool:
        return self._names is None or name in self._names

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


class NamedCallReader:
    """Reads one call from the text before its name, as `CallReader`.

    Attributes:
        may_hold_marks: as of `TaggedArguments`, of this call and the next.

    Args:
        tools: as of `MessageSyntax`.
    """

    def __init__(
        self,
        syntax: ToolCallSyntax,
        tools: Mapping[str, ToolParameters] | None,
        *,
        may_hold_marks: bool = True,
    ) -> None:
        assert isinstance(syntax.call, NamedCall)
        self.rest: str | None = None
        self.no_call: str | None = None
        self.call_id = ""
        self.may_hold_marks = may_hold_marks
        self._syntax = syntax
        self._tools = tools
        self._call = syntax.call
        self._heads = _heads(syntax.call, syntax.end)
        self._head = ""
        self._arguments: ArgumentReader | None = None
        self._end = syntax.call.end.strip()
        self._held = ""  # possibly the beginning of the end
        self._read = self._read_head

    def feed(self, text: str) -> Iterator[CallPiece]:
        """Yield the call's new pieces. Must not be called after its end."""
        return self._read(text)

    def close(self) -> None:
        """Finish after the last text; an incomplete call is none."""
        if self.rest is None and self._arguments is None:
            self._give_up()

    def _read_head(self, text: str) -> Iterator[CallPiece]:
        self._head += text
        for head in self._heads:
            found = head.whole.match(self._head)
            if found is not None and found.end() <= _MAX_NAMED_HEAD_CHARS:
                if self._tools is not None and found["name"] not in self._tools:
                    self._give_up()
                    return
                yield from self._begin(found)
                return
        is_short = len(self._head) <= _MAX_NAMED_HEAD_CHARS
        if not is_short or not any(head.part.fullmatch(self._head) for head in self._heads):
            self._give_up()

    def _begin(self, head: re.Match[str]) -> Iterator[CallPiece]:
        name = head["name"]
        self.call_id = (
            self._call.id_pattern.format(**head.groupdict())
            if self._call.id_pattern
            else new_call_id(self._syntax.id_chars)
        )
        self._arguments = self._reader_of(name)
        self._read = self._read_arguments
        yield name, ""
        yield from self._read(self._head[head.end() :])

    def _reader_of(self, name: str) -> ArgumentReader:
        form = self._call.arguments
        if isinstance(form, ArgumentTags):
            parameters = (self._tools or {}).get(name, _NO_PARAMETERS)
            may_hold_marks = self.may_hold_marks
            return TaggedArguments(form, self._call.end, parameters, may_hold_marks=may_hold_marks)
        return JsonArguments() if form == "json" else LiteralArguments(form)

    def _read_arguments(self, text: str) -> Iterator[CallPiece]:
        assert self._arguments is not None
        yield None, self._arguments.convert(text)
        if self._arguments.rest is not None:
            if isinstance(self._arguments, TaggedArguments):
                self.may_hold_marks = self._arguments.may_hold_marks
            self._read = self._read_end
            yield from self._read(self._arguments.rest)

    def _read_end(self, text: str) -> Iterator[CallPiece]:
        """Read the text after the arguments, which models may forget."""
        text = (self._held + text).lstrip()
        self._held = ""
        if text.startswith(self._end):
            self.rest = text.removeprefix(self._end)
        elif self._end.startswith(text):
            self._held = text
        else:
            self.rest = text
        yield from ()

    def _give_up(self) -> None:
        self.no_call, self.rest = "", self._head


class _Head:
    """A pattern of the text up to the arguments.

    Attributes:
        whole: matches the head; what must follow it is not part of the match.
        part: matches a text that may become a head.
    """

    def __init__(self, atoms: list[str], following: Iterable[str]) -> None:
        following = list(following)
        self.whole = re.compile(f"{''.join(atoms)}(?={''.join(following)})")
        part = ""
        for atom in reversed([*atoms, *following]):
            part = f"(?:{atom}{part})?"
        self.part = re.compile(part)


@lru_cache(maxsize=32)
def _heads(call: NamedCall, section_end: str) -> list[_Head]:
    """Return the patterns of all heads: with an id or without, and by what may follow."""
    before = [*_literal(call.begin), _NAME]
    after = [_SPACE, *_literal(call.name_end.strip())]
    if call.name_end:
        after.append(_SPACE)
    given_id = [_SPACE, *_literal(call.id_begin), _SPACE, _ID]
    ids = [given_id] if call.id_pattern else [[], given_id] if call.id_begin else [[]]
    return [
        _Head([*before, *with_id, *after], following)
        for with_id in ids
        for following in _following(call, section_end)
    ]


def _following(call: NamedCall, section_end: str) -> list[Iterable[str]]:
    if call.arguments == "python":
        return [_KEYWORD, _NO_KEYWORDS]
    if isinstance(call.arguments, ArgumentTags):
        tags = call.arguments.begin, call.end or section_end
        return [()] if call.name_end else [_literal(mark) for mark in tags]
    return [(r"\{",)]


def _literal(text: str) -> list[str]:
    return [re.escape(char) for char in text]
