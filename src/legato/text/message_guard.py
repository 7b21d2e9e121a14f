"""Text of messages kept text: special tokens that stand in it are not read as tokens.

A chat template makes one text of its own special tokens and of a client's strings, in which
`<|im_end|><|im_start|>system` would open another turn. So in the client's strings a stand-in from
Unicode's private use area takes the place of one character of each such string. The template trims,
slices and encodes them as it would the original; the tokenizer finds no special token there, and
puts the characters back before it splits and merges the text (`Tokenizer.encode`).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from legato.core.errors import InvalidRequestError
from legato.text.conversation import Message
from legato.text.special_strings import SEPARATOR, SpecialStrings

MessageSpecialTokens = Literal["text", "special", "refuse"]
"""What becomes of special tokens in the text of messages."""
StandIns = dict[str, str]
"""Key a character that stands in a text for another, value that other."""

_PRIVATE = [chr(code) for code in range(0xE000, 0xF900)]
_IN_PRIVATE = re.compile("[\ue000-\uf8ff]")
_ESCAPED = re.compile(r"\\+u(e[0-9a-f]{3}|f[0-8][0-9a-f]{2})", re.IGNORECASE)
"""As JSON in ASCII, and Python's repr, write one of them."""


class Conversation(NamedTuple):
    """What a chat template is given.

    Attributes:
        options: variables of the template, and arguments of `Tokenizer.render_chat`.
    """

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]]
    options: Mapping[str, Any]


class MessageGuard:
    """Finds special tokens in conversations for one chat template.

    Args:
        strings: those that only the template may write.
        of_assistant: the same without the marks of reasoning and tool calls, which are part of what
            a model has written.
        template: its text.
    """

    def __init__(
        self, strings: SpecialStrings, of_assistant: SpecialStrings, template: str
    ) -> None:
        self._strings = strings
        self._of_assistant = of_assistant
        self._template = template

    def check(self, conversation: Conversation) -> None:
        """Raise `InvalidRequestError`, naming the field, for a special token in its strings."""
        for path, value, strings in self._placed(conversation):
            for inner, text in _texts_at(path, value):
                found = strings.first(text)
                if found is not None:
                    problem = f"{inner} has {found!r}, which is a special token of this model"
                    is_tool = path == "tools"  # not all of them need be shown: no index
                    raise InvalidRequestError(problem, param=path if is_tool else inner)

    def guarded(self, conversation: Conversation) -> tuple[Conversation, StandIns]:
        """The conversation with stand-ins, none in one without special tokens.

        Raises:
            InvalidRequestError: it uses all private characters, or it is nested too deeply.
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
        """Each part of it, where the client finds it, and what it must not have."""
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
    """Puts stand-ins into strings.

    Args:
        texts: all that the prompt is made of; what they have stands for itself.

    Attributes:
        stand_ins: those that were used.
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
        """The same value with stand-ins in its strings, keys of objects included."""
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
    """A rendered text with its stand-ins as they are, where the template wrote escapes of them."""
    if not stand_ins or "\\u" not in text:
        return text

    def plain(found: re.Match[str]) -> str:
        char = chr(int(found[1], 16))
        return char if char in stand_ins else found[0]

    return _ESCAPED.sub(plain, text)


def _texts(values: list[Any]) -> list[str]:
    """All strings in some values; without recursion, for they are as deep as JSON may be."""
    texts, unread = [], list(values)
    for value in unread:  # which grows
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, list | tuple):
            unread += value
        elif isinstance(value, Mapping):
            texts += [key for key in value if isinstance(key, str)]
            unread += value.values()
    return texts


def _texts_at(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """The same, each behind its path."""
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
