"""Reads arguments written as bare text between tags into JSON."""

import json
import math
import re
from decimal import Decimal

import msgspec

from legato.language.message.argument_formats import NUMBER
from legato.language.message.argument_reader import MarkFinder, PieceReader, json_piece
from legato.language.message.message_syntax import ArgumentTags, ArgumentType, ToolParameters

_MAX_HEAD_CHARS = 512
_STRING = ArgumentType(is_text=True)
_KINDS = {"{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
"""Key a JSON text's first letter; any other begins a number."""
_BOOLEANS = {"true": "true", "1": "true", "false": "false", "0": "false"}
_QUOTE = re.compile('"')
_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_INTEGER = re.compile(r"[+-]?[0-9]{1,400}")


class TaggedArguments(PieceReader):
    """Writes tagged arguments as a JSON object.

    A string goes on while it comes. A value that may be of another type waits for its end, which
    decides what it is. Text that is no tag ends the object.

    Attributes:
        may_hold_marks: whether a mark within a string of JSON is part of it; not after a string
            that did not end, since the text after its mark is then read again.

    Args:
        end: text after the last argument, left in `rest`; empty if other text follows.
        parameters: of the tool.
    """

    def __init__(
        self, tags: ArgumentTags, end: str, parameters: ToolParameters, *, may_hold_marks: bool
    ) -> None:
        super().__init__()
        self.may_hold_marks = may_hold_marks
        self._pieces.append("{")
        self._tags = tags
        self._next = (tags.begin, end)
        self._parameters = parameters
        self._is_first = True
        self._key = ""
        self._type = ArgumentType.any()  # of the value
        self._is_json = False  # whether the value is marked as JSON
        self._end = MarkFinder(tags.end)
        self._value = _Waiting()
        self._padding = ""  # possibly the padding after a string
        self._has_begun = False  # whether the padding before the string has been read

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
        self._is_json = bool(found) and is_text != "true"
        self._type = self._parameters.of(self._key)
        if found and not self._is_json:
            self._type = _STRING
        self._end = MarkFinder(self._tags.end)
        self._has_begun = False
        self._value = _Waiting()
        if self._type.is_only_text and not self._is_json:
            self._write_key()
            self._pieces.append('"')
            self._read = self._read_string
        else:
            self._read = self._read_value

    def _read_string(self, text: str) -> str:
        padding = self._tags.padding
        text = self._padding + self._end.feed(text)
        self._padding = ""
        is_ended = self._end.found is not None
        if text and not self._has_begun:
            text, self._has_begun = text.removeprefix(padding), True
        if padding and text.endswith(padding):
            text = text.removesuffix(padding)
            self._padding = "" if is_ended else padding
        self._pieces.append(json_piece(text))
        if not is_ended:
            return ""
        self._pieces.append('"')
        self._read = self._read_first
        return self._end.rest

    def _read_value(self, text: str) -> str:
        self._value.push(self._end.feed(text))
        if self._value.is_broken:
            value, rest = self._value.cut()
            self.may_hold_marks = False
            found = self._end.found
            rest += self._end.flush() if found is None else found + self._end.rest
            self._write_value(value)
            return rest.removeprefix(self._tags.end)
        if self._end.found is None:
            return ""
        rest = self._end.rest
        if self.may_hold_marks and self._value.is_in_string:
            self._value.push_mark(self._tags.end)
            self._end = MarkFinder(self._tags.end)
        else:
            self._write_value(self._value.text)
        return rest

    def _write_value(self, text: str) -> None:
        padding = self._tags.padding
        text = text.removeprefix(padding).removesuffix(padding)
        bare = text.strip()
        self._write_key()
        is_json = self._is_json and _is_json(bare)
        self._pieces.append(bare if is_json else json_value(text, self._type))
        self._read = self._read_first

    def _write_key(self) -> None:
        separator = "" if self._is_first else ", "
        self._is_first = False
        self._pieces.append(f"{separator}{json.dumps(self._key, ensure_ascii=False)}: ")

    def _finish(self, rest: str) -> None:
        self._pieces.append("}")
        self.rest = rest


class _Waiting:
    """The text of a value that waits for its end.

    A mark within a string of a JSON object or list is part of it. No such string has a control
    character: one shows that the text is no JSON, and that its first mark was its end.

    Attributes:
        is_in_string: whether the text so far ends within such a string.
    """

    def __init__(self) -> None:
        self.is_in_string = False
        self._pieces: list[str] = []
        self._num_chars = 0
        self._has_strings: bool | None = None  # None until the first letter
        self._is_escaped = False
        self._first_mark: int | None = None

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def is_broken(self) -> bool:
        """Whether the first mark in a string was the value's end."""
        return self._first_mark is not None and not self._has_strings

    def cut(self) -> tuple[str, str]:
        """Return the text before the first mark in a string, and from that mark on."""
        text, at = self.text, self._first_mark
        return text[:at], text[at:]

    def push_mark(self, mark: str) -> None:
        """Append a mark that stands in a string."""
        if self._first_mark is None:
            self._first_mark = self._num_chars
        self.push(mark)

    def push(self, text: str) -> None:
        self._pieces.append(text)
        self._num_chars += len(text)
        if self._has_strings is None and (begun := text.lstrip()):
            self._has_strings = begun[0] in "[{"
        self._scan(text)

    def _scan(self, text: str) -> None:
        at = 0
        while self._has_strings and at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_IN_STRING if self.is_in_string else _QUOTE).search(text, at)
            if found is None:
                return
            at = found.end()
            if found[0] == '"':
                self.is_in_string = not self.is_in_string
            elif found[0] == "\\":
                self._is_escaped = True
            else:
                self._has_strings = self.is_in_string = False


def json_value(text: str, kind: ArgumentType) -> str:
    """Return the JSON of a bare text: of the first type that it fits, else a string.

    `True` and `None` are constants too. Where it may be a string, only JSON's numbers are numbers;
    elsewhere `.5` and `007` are too, and `1` is true.
    """
    bare = text.strip()
    if text in kind.texts:
        return _quoted(text)
    is_lenient = not kind.is_text
    values = (_typed(bare, name, is_lenient=is_lenient) for name in kind.kinds)
    listed = (value for value in kind.values if _is_value(bare, value, is_lenient=is_lenient))
    found = next(filter(None, values), None) or next(listed, None)
    if found is None and is_lenient:
        found = next((_quoted(one) for one in kind.texts if bare in (one, _quoted(one))), None)
    return _quoted(text) if found is None else found


def _is_value(text: str, value: str, *, is_lenient: bool) -> bool:
    """Whether a text stands for a JSON value."""
    kind = _KINDS.get(value[0], "number")
    typed = _typed(text, kind, is_lenient=is_lenient)
    if typed is None or typed == value:
        return typed is not None
    try:
        return bool(msgspec.json.decode(typed) == msgspec.json.decode(value))
    except msgspec.DecodeError:  # a number beyond those of Python
        return False


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _typed(text: str, name: str, *, is_lenient: bool) -> str | None:
    """Return the JSON of a text that is a value of a type; None if it is none."""
    if name in ("array", "object"):
        begin = "[" if name == "array" else "{"
        return text if text.startswith(begin) and _is_json(text) else None
    if name == "null":
        return "null" if text in ("null", "None") else None
    if name == "boolean":
        return _BOOLEANS.get(text.lower() if is_lenient or not text.isdecimal() else "")
    if not is_lenient and not NUMBER.fullmatch(text):
        return None
    if name == "number":
        return text if NUMBER.fullmatch(text) else _number(text)
    if name == "integer":
        number = _number(text)
        return number if number is None or _INTEGER.fullmatch(number) else _whole(text)
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


def _whole(text: str) -> str | None:
    """Return a number with a fraction or an exponent as an integer, exactly; None if it is none."""
    number = Decimal(text)
    return str(int(number)) if number == number.to_integral_value() else None


def _is_json(text: str) -> bool:
    """Whether a text is JSON, by its syntax: a number may be beyond those of Python."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
