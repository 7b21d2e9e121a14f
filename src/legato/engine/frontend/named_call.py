"""Reads a tool call that is a name followed by arguments, piece by piece."""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from legato.engine.frontend.argument_reader import ArgumentReader, JsonArguments
from legato.engine.frontend.literal_arguments import LiteralArguments
from legato.engine.frontend.tagged_arguments import TaggedArguments
from legato.engine.frontend.tool_call import CallPiece, new_call_id
from legato.text.message_syntax import ArgumentTags, NamedCall, ToolCallSyntax

_MAX_HEAD_CHARS = 512
_SPACE = r"\s*+"
_NAME = r"(?P<name>[\w.-]++)"
_ID = r"(?P<id>[\w-]++)"
_KEYWORD = (r"\(", _SPACE, r"[^\W\d]\w*+", _SPACE, "=")
_NO_KEYWORDS = (r"\(", _SPACE, r"\)")


class NamedCallReader:
    """Reads one call from the text before its name, as `CallReader`."""

    def __init__(self, syntax: ToolCallSyntax) -> None:
        assert isinstance(syntax.call, NamedCall)
        self.rest: str | None = None
        self.no_call: str | None = None
        self.call_id = ""
        self._syntax = syntax
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
            if found is not None and found.end() <= _MAX_HEAD_CHARS:
                yield from self._begin(found)
                return
        is_short = len(self._head) <= _MAX_HEAD_CHARS
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
            return TaggedArguments(form, self._call.end, self._syntax.types.get(name, {}))
        return JsonArguments() if form == "json" else LiteralArguments(form)

    def _read_arguments(self, text: str) -> Iterator[CallPiece]:
        assert self._arguments is not None
        yield None, self._arguments.convert(text)
        if self._arguments.rest is not None:
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
