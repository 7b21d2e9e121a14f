"""Reads arguments written as literals of Python or of Gemma into JSON."""

import json
import math
import re
from typing import Literal, NamedTuple

from legato.language.message.argument_reader import MarkFinder, PieceReader, json_piece
from legato.language.message.message_syntax import GEMMA_QUOTE

Dialect = Literal["python", "gemma"]

_MAX_WORD_CHARS = 512
_MAX_SPACE_CHARS = 64
"""Space between a value and the mark that follows it."""
_WORDS = {"True": "true", "False": "false", "None": "null"}
_CONSTANTS = frozenset({"true", "false", "null"})
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_PYTHON_WORD = re.compile(r"[^\s,:=()\[\]{}\"']+")
_GEMMA_WORD = re.compile(r"[^,:{}\[\]<\s](?:[^,:{}\[\]<]*[^,:{}\[\]<\s])?")
_QUOTED = re.compile(r"[\"'\\]")
_AFTER_KEY = re.compile(r"\s{0,64}+:")
_AFTER_VALUE = re.compile(r"\s{0,64}+[,)\]}]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v"}
_ESCAPED = {**_ESCAPES, "0": "\0", "\n": "", "\\": "\\", "'": "'", '"': '"', "/": "/"}
_CODE_CHARS = {"x": 2, "u": 4, "U": 8}


class _Open(NamedTuple):
    """A bracket that is open. Attributes: `end` is its own end, `json_end` that in JSON."""

    end: str
    json_end: str

    @property
    def is_object(self) -> bool:
        return self.json_end == "}"


_OBJECT, _LIST = _Open("}", "}"), _Open("]", "]")
_GEMMA_BRACKETS = {"{": _OBJECT, "[": _LIST}
_PYTHON_BRACKETS = {**_GEMMA_BRACKETS, "(": _Open(")", "]")}
_KEYWORDS = _Open(")", "}")
"""The parentheses of Python's keyword arguments."""


class LiteralArguments(PieceReader):
    """Writes literals as JSON, from the bracket that opens the arguments.

    Strings go on while they come. Text that is no literal ends the arguments there.

    A quote in Python's strings ends a string only before a comma, colon or bracket: templates
    write strings without escapes, and models learn from them.
    """

    def __init__(self, dialect: Dialect) -> None:
        super().__init__()
        self._is_gemma = dialect == "gemma"
        self._brackets = _GEMMA_BRACKETS if self._is_gemma else _PYTHON_BRACKETS
        self._quote = ""  # of the string that is read
        self._quote_end = MarkFinder(GEMMA_QUOTE)
        self._open: list[_Open] = []
        # Of the innermost bracket:
        self._has_item = False  # whether it has a whole item
        self._has_comma = False  # whether a comma follows that
        self._has_key = False  # whether its next value has a key
        self._is_keyed = False  # whether that key's colon has been read

    def _read_first(self, text: str) -> str:
        self._enter(_OBJECT if self._is_gemma else _KEYWORDS, "{")
        self._read = self._read_mark
        return text[1:]

    def _read_mark(self, text: str) -> str:
        text = text.lstrip()
        if not text:
            return ""
        mark = text[0]
        if mark in ")]}":
            return self._leave(text)
        if mark == "," and self._has_item and not self._has_comma:
            self._has_comma = True
            return text[1:]
        if mark in ":=" and self._has_key and not self._is_keyed:
            self._pieces.append(": ")
            self._is_keyed = True
            return text[1:]
        if not self._may_begin():
            return self._give_up(text)
        bracket = self._brackets.get(mark)
        if bracket is not None and not self._needs_key():
            self._write_comma()
            self._enter(bracket, "{" if bracket.is_object else "[")
            return text[1:]
        return self._read_value(text)

    def _may_begin(self) -> bool:
        """Whether a key or a value may come next."""
        if self._has_key:
            return self._is_keyed
        return self._has_comma or not self._has_item

    def _needs_key(self) -> bool:
        return self._open[-1].is_object and not self._has_key

    def _read_value(self, text: str) -> str:
        quote = GEMMA_QUOTE if self._is_gemma else text[0]
        if text.startswith(quote) and (self._is_gemma or quote in "\"'"):
            self._write_comma()
            self._pieces.append('"')
            self._quote, self._quote_end = quote, MarkFinder(GEMMA_QUOTE)
            self._read = self._read_gemma_string if self._is_gemma else self._read_string
            return text.removeprefix(quote)
        if self._is_gemma and GEMMA_QUOTE.startswith(text):
            self._held = text
            return ""
        word = (_GEMMA_WORD if self._is_gemma else _PYTHON_WORD).match(text)
        if word is None or word.end() > _MAX_WORD_CHARS:
            return self._give_up(text)
        after = text[word.end() :]
        rest = after.lstrip()
        if len(after) - len(rest) > _MAX_SPACE_CHARS:
            return self._give_up(text)
        if not rest:  # the word may go on
            self._held = text
            return ""
        self._write_comma()
        is_key = self._needs_key()
        self._pieces.append(json.dumps(word[0], ensure_ascii=False) if is_key else _json(word[0]))
        self._finish_value()
        return rest

    def _read_gemma_string(self, text: str) -> str:
        self._pieces.append(json_piece(self._quote_end.feed(text)))
        return self._end_string(self._quote_end.rest) if self._quote_end.found else ""

    def _read_string(self, text: str) -> str:
        mark = _QUOTED.search(text)
        if mark is None:
            self._pieces.append(json_piece(text))
            return ""
        self._pieces.append(json_piece(text[: mark.start()]))
        text = text[mark.start() :]
        if text[0] == "\\":
            return self._read_escape(text)
        rest = text[1:]
        if text[0] == self._quote:
            after = _AFTER_KEY if self._needs_key() else _AFTER_VALUE
            if after.match(rest):
                return self._end_string(rest)
            if not rest.strip() and len(rest) <= _MAX_SPACE_CHARS:
                self._held = text
                return ""
        self._pieces.append(json_piece(text[0]))
        return rest

    def _read_escape(self, text: str) -> str:
        if len(text) < 2:
            self._held = text
            return ""
        num_digits = _CODE_CHARS.get(text[1], 0)
        if text[1] in _ESCAPED:
            self._pieces.append(json_piece(_ESCAPED[text[1]]))
            return text[2:]
        digits = text[2 : 2 + num_digits]
        is_code = num_digits > 0 and re.fullmatch("[0-9a-fA-F]*", digits) is not None
        if is_code and len(digits) < num_digits:
            self._held = text
            return ""
        code = int(digits, 16) if is_code else 0x110000
        if code >= 0x110000:  # a backslash of its own, as in Python
            self._pieces.append(json_piece("\\"))
            return text[1:]
        # Half of a pair of surrogates stays an escape, which JSON has too.
        is_half = 0xD800 <= code < 0xE000
        self._pieces.append(f"\\u{code:04x}" if is_half else json_piece(chr(code)))
        return text[2 + num_digits :]

    def _end_string(self, rest: str) -> str:
        self._pieces.append('"')
        self._read = self._read_mark
        self._finish_value()
        return rest

    def _finish_value(self) -> None:
        """Book a key or a value that has ended."""
        if self._needs_key():
            self._has_key, self._is_keyed = True, False
        else:
            self._has_item, self._has_comma, self._has_key = True, False, False

    def _write_comma(self) -> None:
        """Write the comma before an item; one before a closing bracket has none in JSON."""
        if self._has_comma and not self._has_key:
            self._pieces.append(", ")

    def _enter(self, bracket: _Open, json_begin: str) -> None:
        self._pieces.append(json_begin)
        self._open.append(bracket)
        self._has_item = self._has_comma = self._has_key = False

    def _leave(self, text: str) -> str:
        bracket = self._open[-1]
        if text[0] != bracket.end or self._has_key:
            return self._give_up(text)
        self._pieces.append(bracket.json_end)
        self._open.pop()
        if not self._open:
            self.rest = text[1:]
            return ""
        # A bracket that was open in an object had a key.
        self._has_key = self._open[-1].is_object
        self._finish_value()
        return text[1:]

    def _give_up(self, text: str) -> str:
        self.rest = text
        return ""


def _json(word: str) -> str:
    """Return a word as JSON: a constant, a number, or else a string."""
    word = _WORDS.get(word, word)
    if word in _CONSTANTS or NUMBER.fullmatch(word):
        return word
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    return repr(number) if math.isfinite(number) else json.dumps(word, ensure_ascii=False)
