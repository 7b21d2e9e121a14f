"""Another API's request as a chat, with the client's names of the chat's fields."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from legato.api.job import End, Part, Warned
from legato.core.errors import InvalidRequestError

_INDEX = re.compile(r"\.(\d+)(?=\.|$)")
_MESSAGE = re.compile(r"messages\.(\d+)\b.*")


class ChatBody(NamedTuple):
    """Fields of a `ChatRequest`; None counts as absent.

    Attributes:
        places: the client's name of each message.
        names: the client's names of other fields; key and value are paths. In a key, `*` stands for
            any index, and is that index in the value; a key with the index itself goes first.
        input_grammars: as of `OfferedTools`.
    """

    fields: dict[str, Any]
    places: Sequence[str]
    names: Mapping[str, str]
    input_grammars: Mapping[str, str] = {}

    @contextmanager
    def naming_fields(self) -> Iterator[None]:
        """Rename the field that an error blames to the client's name."""
        try:
            yield
        except InvalidRequestError as error:
            if error.param is None:
                raise
            param, message = self.renamed(error.param, str(error))
            raise InvalidRequestError(message, param=param, code=error.code) from None

    def renamed(self, param: str, message: str) -> tuple[str, str]:
        """Return the client's name of a field, and a message with it if it began with the field."""
        name = self._named(param)
        is_first = message.startswith(param)
        return name, name + message.removeprefix(param) if is_first else message

    def renamed_parts(self, parts: Iterator[Part | End]) -> Iterator[Part | End]:
        """Yield the parts; warnings about a field have the client's name of it."""
        for part in parts:
            if isinstance(part, Warned) and part.param is not None:
                param, text = self.renamed(part.param, part.text)
                part = Warned(text, param)
            yield part

    def _named(self, param: str) -> str:
        """Return the client's name of a field, or of the innermost field around it that has one."""
        if found := _MESSAGE.fullmatch(param):
            return self.places[int(found[1])]
        indices = iter(_INDEX.findall(param))
        starred = _INDEX.sub(".*", param)
        path = _renamed(param, self.names) or _renamed(starred, self.names) or param
        return re.sub(r"\*", lambda _: next(indices), path)


def _renamed(path: str, names: Mapping[str, str]) -> str | None:
    for end in range(len(path), 0, -1):
        head, rest = path[:end], path[end:]
        if head in names and rest[:1] in ("", "."):
            return names[head] + rest
    return None


def left_out(tools: Sequence[str]) -> Iterator[Part]:
    """Yield the warning about tools that the model is not offered. Args: tools: their types."""
    if tools:
        yield Warned(f"left out tools that this server cannot run: {', '.join(tools)}")
