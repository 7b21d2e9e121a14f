"""Keeps special tokens in a client's messages from being read as tokens.

A chat template renders its own special tokens and a client's strings into one text, in which the
client's `<|im_end|><|im_start|>system` would open another turn. So in each such string of the
client's, a stand-in from Unicode's private use area replaces one character. The template trims,
slices and encodes the string as before; the tokenizer finds no special token in it, and restores
the characters before it splits and merges the text (`Tokenizer.encode`).
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from legato.core.errors import InvalidRequestError
from legato.language.conversation.rewrite import Message

SEPARATOR = "\0"
_NEVER = r"(?!)"
_MAX_CHARS = 64
"""Longer strings are found by their beginning, which keeps the pattern small."""


class SpecialStrings:
    """A set of special strings.

    Args:
        strings: special strings, of at least one character each.
        others: all other strings that are whole tokens; one that contains a special string is read
            as the longer token.
    """

    def __init__(self, strings: Iterable[str], others: Iterable[str] = ()) -> None:
        self._strings = frozenset(text[:_MAX_CHARS] for text in strings if text.strip())
        whole = _pattern(self._strings) or _NEVER
        self._others = frozenset(filter(re.compile(whole).search, others)) - self._strings
        self._pattern = re.compile(_pattern(self._strings | self._others) or _NEVER)
        beginnings = {
            text[:end]
            for text in self._strings
            for end in range(1, len(text))
            if text[:end].strip()
        }
        self._beginning = re.compile(rf"(?:{_pattern(beginnings) or _NEVER})\Z")
        self._firsts = {text[0] for text in self._strings}
        ending = rf"(?:{_pattern(beginnings) or _NEVER})\s*(?:{SEPARATOR}|\Z)"
        self._any_place = re.compile(f"{whole}|{ending}")

    def may_be_in(self, joined: str) -> bool:
        """Whether `places` would find any in many texts; far faster than searching each.

        Args:
            joined: the texts, with `SEPARATOR` between them.
        """
        has_first = any(first in joined for first in self._firsts)  # few texts have one
        return has_first and self._any_place.search(joined) is not None

    def first(self, text: str) -> str | None:
        """Return the first special string in a text."""
        found = next(self._found(text), None)
        return found and found[0]

    def places(self, text: str) -> list[int]:
        """Return indices of characters to replace so that no special string begins in a text.

        A special string cut off by the end of the text counts too: the next text may complete it.
        """
        if not any(first in text for first in self._firsts):
            return []
        places = {found.start() + _num_blanks(found[0]) for found in self._found(text)}
        ending = text.rstrip()
        skipped = max(0, len(ending) - _MAX_CHARS)
        found = self._beginning.search(ending, skipped)
        while found is not None:
            places.add(found.start() + _num_blanks(found[0]))
            found = self._beginning.search(ending, found.start() + 1)
        return sorted(places)

    def _found(self, text: str) -> Iterator[re.Match[str]]:
        """Yield all special strings, which may overlap."""
        found = self._pattern.search(text)
        while found is not None:
            is_other = found[0] in self._others
            if not is_other:
                yield found
            found = self._pattern.search(text, found.end() if is_other else found.start() + 1)


def _num_blanks(text: str) -> int:
    """Return the number of blanks at the start of a text."""
    return len(text) - len(text.lstrip())


def _pattern(strings: Collection[str]) -> str:
    """Return a pattern that matches the longest of the strings and reads each character once."""
    rests: dict[str, list[str]] = {}  # key the first character
    for text in filter(None, strings):
        rests.setdefault(text[0], []).append(text[1:])
    branches = [re.escape(first) + _pattern(rest) for first, rest in sorted(rests.items())]
    is_whole = len(branches) == 1 and "" not in strings
    if is_whole or not branches:
        return "".join(branches)
    return f"(?:{'|'.join(branches)})" + ("?" if "" in strings else "")


MessageSpecialTokens = Literal["text", "special", "refuse"]
"""How to treat special tokens in the text of messages."""
StandIns = dict[str, str]
"""Key a stand-in, value the character that it replaces."""

_PRIVATE = [chr(code) for code in range(0xE000, 0xF900)]
_IN_PRIVATE = re.compile("[\ue000-\uf8ff]")
_ESCAPED = re.compile(r"\\+u(e[0-9a-f]{3}|f[0-8][0-9a-f]{2})", re.IGNORECASE)
"""A private character as escaped by JSON in ASCII and by Python's repr."""


class Conversation(NamedTuple):
    """The input of a chat template.

    Attributes:
        options: variables of the template, and arguments of `Tokenizer.render_chat`.
    """

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]]
    options: Mapping[str, Any]


class MessageGuard:
    """Finds special tokens in conversations for one chat template.

    Args:
        strings: special strings that only the template may write.
        of_assistant: the same without the marks of reasoning and tool calls, which are part of a
            model's own messages.
        template: its text.
    """

    def __init__(
        self, strings: SpecialStrings, of_assistant: SpecialStrings, template: str
    ) -> None:
        self._strings = strings
        self._of_assistant = of_assistant
        self._template = template

    def check(self, conversation: Conversation) -> None:
        """Raise `InvalidRequestError`, naming the field, if a string has a special token."""
        for path, value, strings in self._placed(conversation):
            for inner, text in _texts_at(path, value):
                found = strings.first(text)
                if found is not None:
                    problem = f"{inner} has {found!r}, which is a special token of this model"
                    is_tool = path == "tools"  # the message may list only some tools: no index
                    raise InvalidRequestError(problem, param=path if is_tool else inner)

    def guarded(self, conversation: Conversation) -> tuple[Conversation, StandIns]:
        """Return the conversation with stand-ins; there are none without special tokens.

        Raises:
            InvalidRequestError: it uses all private characters, or is nested too deeply.
        """
        texts = _texts(list(conversation))
        if not self._strings.may_be_in(SEPARATOR.join(texts)):
            return conversation, {}
        substitution = _Substitution([self._template, *texts])
        guarded = Conversation(
            messages=[
                {
                    name: substitution.made(value, self._strings_of(message, name))
                    for name, value in message.items()
                }
                for message in conversation.messages
            ],
            tools=[substitution.made(tool, self._strings) for tool in conversation.tools],
            options=substitution.made(dict(conversation.options), self._strings),
        )
        return guarded, substitution.stand_ins

    def _placed(self, conversation: Conversation) -> Iterator[tuple[str, Any, SpecialStrings]]:
        """Yield each part with its path for the client and its forbidden strings."""
        for i, message in enumerate(conversation.messages):
            for name, value in message.items():
                yield f"messages.{i}.{name}", value, self._strings_of(message, name)
        for tool in conversation.tools:
            yield "tools", tool, self._strings
        for name, value in conversation.options.items():
            yield f"chat_template_kwargs.{name}", value, self._strings

    def _strings_of(self, message: Message, name: str) -> SpecialStrings:
        is_written = message.get("role") == "assistant" and name in ("content", "reasoning_content")
        return self._of_assistant if is_written else self._strings


class _Substitution:
    """Replaces characters in strings by stand-ins.

    Args:
        texts: all parts of the prompt; private characters in them are never used as stand-ins.

    Attributes:
        stand_ins: the stand-ins used so far.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.stand_ins: StandIns = {}
        self._of: dict[str, str] = {}  # key a character, value its stand-in
        used: set[str] = set()
        for text in texts:
            used.update(_IN_PRIVATE.findall(text))
            used.update(chr(int(code, 16)) for code in _ESCAPED.findall(text))
        self._free = (char for char in _PRIVATE if char not in used)

    def made(self, value: Any, strings: SpecialStrings) -> Any:
        """Return the value with stand-ins in its strings, keys of objects included."""
        try:
            return self._made(value, strings)
        except RecursionError as error:
            raise InvalidRequestError("the messages are nested too deeply") from error

    def _made(self, value: Any, strings: SpecialStrings) -> Any:
        if isinstance(value, str):
            return self._made_text(value, strings)
        if isinstance(value, Mapping):
            return {self._made(k, strings): self._made(v, strings) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._made(inner, strings) for inner in value]
        return value

    def _made_text(self, text: str, strings: SpecialStrings) -> str:
        places = strings.places(text)
        if not places:
            return text
        chars = list(text)
        for place in places:
            chars[place] = self._stand_in_of(chars[place])
        return "".join(chars)

    def _stand_in_of(self, char: str) -> str:
        if char not in self._of:
            stand_in = next(self._free, None)
            if stand_in is None:
                raise InvalidRequestError("the messages have all characters for private use")
            self._of[char], self.stand_ins[stand_in] = stand_in, char
        return self._of[char]


def unescaped(text: str, stand_ins: StandIns) -> str:
    """Return a rendered text with escaped stand-ins, as the template may write them, unescaped."""
    if not stand_ins or "\\u" not in text:
        return text

    def plain(found: re.Match[str]) -> str:
        char = chr(int(found[1], 16))
        return char if char in stand_ins else found[0]

    return _ESCAPED.sub(plain, text)


def _texts(values: list[Any]) -> list[str]:
    """Return all strings in some values; without recursion, as JSON may be nested deeply."""
    texts, unread = [], list(values)
    for value in unread:  # grows during the loop
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, list | tuple):
            unread += value
        elif isinstance(value, Mapping):
            texts += [key for key in value if isinstance(key, str)]
            unread += value.values()
    return texts


def _texts_at(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield each string in a value after its path."""
    unread = [(path, value)]
    while unread:
        path, value = unread.pop()
        if isinstance(value, str):
            yield path, value
        elif isinstance(value, Mapping):
            unread += ((path, key) for key in value)
            unread += ((f"{path}.{key}", inner) for key, inner in value.items())
        elif isinstance(value, list | tuple):
            unread += ((f"{path}.{i}", inner) for i, inner in enumerate(value))
