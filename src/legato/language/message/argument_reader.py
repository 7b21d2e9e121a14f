"""Reads the arguments of a tool call from a model's text, piece by piece, into JSON."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from legato.language.output_text import overlap

_OUTSIDE_STRINGS = re.compile(r'["{}\[\]]')
_INSIDE_STRINGS = re.compile(r'["\\]')


class ArgumentReader(Protocol):
    """Reads one call's arguments.

    No piece is taken back, and how the text is cut makes no difference. Arguments that break off
    stay incomplete.

    Attributes:
        rest: the text after the arguments; None until they end.
    """

    rest: str | None

    def convert(self, text: str) -> str:
        """Return the next piece of a JSON object. Must not be called after its end."""
        ...


class PieceReader(ABC):
    """Writes arguments as JSON; `_read` is the method that reads what comes next.

    Such a method reads the text's beginning, appends JSON to `_pieces` and returns the rest. Text
    that is too short to be read becomes `_held`.
    """

    def __init__(self) -> None:
        self.rest: str | None = None
        self._pieces: list[str] = []
        self._held = ""
        self._read: Callable[[str], str] = self._read_first

    @abstractmethod
    def _read_first(self, text: str) -> str: ...

    def convert(self, text: str) -> str:
        text, self._held = self._held + text, ""
        while text and self.rest is None:
            text = self._read(text)
        piece = "".join(self._pieces)
        self._pieces.clear()
        return piece


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


class JsonArguments:
    """Passes a JSON object on as the model writes it."""

    def __init__(self) -> None:
        self.rest: str | None = None
        self._end = ObjectEnd()

    def convert(self, text: str) -> str:
        length = self._end.find(text)
        if length is not None:
            self.rest = text[length:]
        return text[:length]


class MarkFinder:
    """Finds the first of some marks in a text that comes in pieces.

    Attributes:
        found: the mark, once it has been found.
        rest: the text after it.
    """

    def __init__(self, *marks: str) -> None:
        self._pattern = re.compile("|".join(map(re.escape, marks)))
        self._marks = marks
        self._firsts = {mark[0] for mark in marks}
        self._held = ""
        self.found: str | None = None
        self.rest = ""

    def feed(self, text: str) -> str:
        """Return the text that is known to stand before the mark."""
        text, self._held = self._held + text, ""
        found = self._pattern.search(text)
        if found is not None:
            self.found, self.rest = found[0], text[found.end() :]
            return text[: found.start()]
        if any(first in text for first in self._firsts):
            num_held = max(overlap(text, mark) for mark in self._marks)
            self._held = text[len(text) - num_held :]
        return text[: len(text) - len(self._held)]

    @property
    def num_held(self) -> int:
        """Characters that may begin a mark."""
        return len(self._held)

    def flush(self) -> str:
        """Return the text that was held for a mark that did not come."""
        held, self._held = self._held, ""
        return held


def json_piece(text: str) -> str:
    """Return a text as a part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
