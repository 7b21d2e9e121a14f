"""Reads arguments that stand in tags as bare text, typed by the tool's schema."""

import json
import math
import re
from collections.abc import Mapping

import msgspec

from legato.engine.frontend.argument_reader import MarkFinder, PieceReader, json_piece
from legato.text.message_syntax import ArgumentTags

_MAX_HEAD_CHARS = 512
_TEXT = ("string",)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_INTEGER = re.compile(r"[+-]?[0-9]{1,400}")


class TaggedArguments(PieceReader):
    """Writes tagged arguments as a JSON object.

    A string goes on while it comes. A value of another type waits for its end, which decides
    whether it is of that type; else it is a string. Text that is no tag ends the object.

    Args:
        end: text after the last argument, left in `rest`; empty if other text follows.
        types: key a parameter, value its types; a value without any is a string unless it is JSON.
    """

    def __init__(self, tags: ArgumentTags, end: str, types: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__()
        self._pieces.append("{")
        self._tags = tags
        self._next = (tags.begin, end)
        self._types = types
        self._is_first = True
        self._key = ""
        self._of_key: tuple[str, ...] = ()  # the types of the value
        self._end = MarkFinder(tags.end)
        self._value: list[str] = []  # of a value that waits for its end
        self._padding = ""  # possibly the padding after a value
        self._has_begun = False  # whether the padding before the value has been read

    def _read_first(self, text: str) -> str:
        text = text.lstrip()
        if text.startswith(self._tags.begin):
            self._read = self._read_name
            return text.removeprefix(self._tags.begin)
        if any(mark.startswith(text) and mark != text for mark in self._next):
            self._held = text
        else:
            self._finish(text)
        return ""

    def _read_name(self, text: str) -> str:
        name, found, rest = text.partition(self._tags.name_end)
        begin = self._tags.value_begin
        value = rest.lstrip() if begin else rest
        head_chars = len(text) - len(value)
        if found and value.startswith(begin) and head_chars <= _MAX_HEAD_CHARS:
            self._begin_value(name)
            return value.removeprefix(begin)
        if head_chars <= _MAX_HEAD_CHARS and begin.startswith(value):
            self._held = text
        else:
            self._finish(self._tags.begin + text)
        return ""

    def _begin_value(self, name: str) -> None:
        attribute = self._tags.text_attribute
        name, found, is_text = name.partition(attribute) if attribute else (name, "", "")
        self._key = name.strip()
        self._of_key = self._types.get(self._key, ())
        if found:
            self._of_key = _TEXT if is_text == "true" else ()
        self._end = MarkFinder(self._tags.end)
        self._has_begun = False
        if self._of_key == _TEXT:
            self._write_key()
            self._pieces.append('"')
        self._read = self._read_value

    def _read_value(self, text: str) -> str:
        padding = self._tags.padding
        text = self._padding + self._end.feed(text)
        self._padding = ""
        is_ended = self._end.found is not None
        if text and not self._has_begun:
            text, self._has_begun = text.removeprefix(padding), True
        if padding and text.endswith(padding):
            text = text.removesuffix(padding)
            self._padding = "" if is_ended else padding
        if self._of_key == _TEXT:
            self._pieces.append(json_piece(text))
        else:
            self._value.append(text)
        if not is_ended:
            return ""
        self._end_value()
        return self._end.rest

    def _end_value(self) -> None:
        if self._of_key == _TEXT:
            self._pieces.append('"')
        else:
            self._write_key()
            self._pieces.append(json_value("".join(self._value), self._of_key))
            self._value.clear()
        self._read = self._read_first

    def _write_key(self) -> None:
        separator = "" if self._is_first else ", "
        self._is_first = False
        self._pieces.append(f"{separator}{json.dumps(self._key, ensure_ascii=False)}: ")

    def _finish(self, rest: str) -> None:
        self._pieces.append("}")
        self.rest = rest


def json_value(text: str, types: tuple[str, ...]) -> str:
    """Return the JSON of a bare text: of the first type that it fits, else a string.

    Args:
        types: the types that the value may have; without any, JSON stays as it is.
    """
    bare = text.strip()
    if not types and _is_json(bare) and not bare.startswith('"'):
        return bare
    values = (_typed(bare, name) for name in types)
    return next(filter(None, values), json.dumps(text, ensure_ascii=False))


def _typed(text: str, name: str) -> str | None:
    """Return the JSON of a text that is a value of a type; None if it is none."""
    if name == "boolean":
        return {"true": "true", "1": "true", "false": "false", "0": "false"}.get(text.lower())
    if name == "null":
        return "null" if text in ("null", "None") else None
    if name == "number":
        return text if _NUMBER.fullmatch(text) else _number(text)
    if name == "integer":
        number = _number(text)
        return number if number is None or _INTEGER.fullmatch(number) else _whole(float(number))
    if name in ("array", "object"):
        begin = "[" if name == "array" else "{"
        return text if text.startswith(begin) and _is_json(text) else None
    return None


def _number(text: str) -> str | None:
    """Return a number that need not be written as JSON's are, such as `.5`, as JSON."""
    if _INTEGER.fullmatch(text):
        return str(int(text))
    try:
        number = float(text)
    except ValueError:
        return None
    return repr(number) if math.isfinite(number) else None


def _whole(number: float) -> str | None:
    return str(int(number)) if number.is_integer() else None


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
