"""How models mark reasoning and tool calls in the text of a message."""

from collections.abc import Iterator
from typing import Literal

import msgspec


class ArgumentType(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the bare text of an argument may stand for.

    Attributes:
        kinds: JSON types that the value may have, other than a string, in the schema's order.
        values: JSON of the only values of the other types.
        texts: the only strings, unless `is_text`.
        is_text: whether it may be any string.
    """

    kinds: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    is_text: bool = False

    @classmethod
    def any(cls) -> "ArgumentType":
        """Return the type of an argument without a schema: JSON, or else a string."""
        return _ANY_TYPE

    @property
    def is_only_text(self) -> bool:
        """Whether every text stands for itself."""
        return not self.kinds and not self.values


_ANY_TYPE = ArgumentType(kinds=("number", "boolean", "null", "array", "object"), is_text=True)


class ToolParameters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The types of a tool's parameters.

    Attributes:
        named: key a parameter.
        others: of a parameter that is not named.
    """

    named: dict[str, ArgumentType] = {}
    others: ArgumentType = _ANY_TYPE

    def of(self, name: str) -> ArgumentType:
        return self.named.get(name, self.others)


class Marks(msgspec.Struct, frozen=True):
    """The text before and after a part of a message."""

    begin: str
    end: str


class JsonCall(msgspec.Struct, frozen=True, tag=True):
    """A call that is a JSON object of "name" and its arguments.

    Attributes:
        arguments_key: the key of the arguments.
    """

    arguments_key: str = "arguments"

    @property
    def marks(self) -> tuple[str, ...]:
        return ()


class ArgumentTags(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments in tags: a name, and a value as bare text, whose type the tool's schema has.

    Attributes:
        begin, name_end: before and after an argument's name.
        value_begin: between `name_end` and the value, perhaps after space.
        end: after a value.
        space: between tags, and around all of them.
        padding: space on both sides of a value that is not part of it.
        text_attribute: between a name and "true" or "false": whether the value is a string.
    """

    begin: str
    name_end: str
    value_begin: str = ""
    end: str
    space: str = "\n"
    padding: str = ""
    text_attribute: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.begin, self.name_end, self.value_begin, self.end)


class NamedCall(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A call that is a name followed by arguments.

    Attributes:
        begin: text before the name.
        id_begin: text between the name and an id, if calls have ids.
        id_pattern: the call's id, made of "{name}" and "{id}"; empty if the engine makes ids.
        name_end: text between the name, or the id, and the arguments.
        arguments: a JSON object; Python's keyword arguments in parentheses; Gemma's object, whose
            keys are bare and whose strings stand between `GEMMA_QUOTE`s; or tags.
        end: text after the arguments.
    """

    begin: str = ""
    id_begin: str = ""
    id_pattern: str = ""
    name_end: str = ""
    arguments: Literal["json", "python", "gemma"] | ArgumentTags = "json"
    end: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        tags = self.arguments.marks if isinstance(self.arguments, ArgumentTags) else ()
        quotes = (GEMMA_QUOTE,) if self.arguments == "gemma" else ()
        return (self.begin, self.id_begin, self.name_end, self.end, *tags, *quotes)


GEMMA_QUOTE = '<|"|>'


class ToolCallSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """How a model calls tools: in sections, each with one call or several.

    Attributes:
        begin, end: of a section; an empty `end` means the end of the message.
        call: how one call is written.
        is_list: whether a section always holds a list of calls in brackets, even of one.
        is_shared: whether calls at once share a section, one after the other.
        is_bare: whether a message that is one JSON call is a call, without `begin`.
        space: between the marks of a section and its calls.
        separator: between sections, or between calls that share one.
        id_chars: length of a call's id, if the chat template requires one.
    """

    begin: str
    end: str = ""
    call: JsonCall | NamedCall = JsonCall()
    is_list: bool = False
    is_shared: bool = False
    is_bare: bool = False
    space: str = ""
    separator: str = ""
    id_chars: int | None = None

    @property
    def needs_types(self) -> bool:
        """Whether arguments are text whose type only the tool's schema has."""
        return isinstance(self.call, NamedCall) and isinstance(self.call.arguments, ArgumentTags)

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.begin, self.end, *self.call.marks)


class Channels(msgspec.Struct, frozen=True, kw_only=True):
    """The marks of OpenAI's harmony format: a message in parts, each on a channel.

    The part's header names its channel, "analysis" for reasoning, and may name a recipient: the
    tool that it calls. Source: https://cookbook.openai.com/articles/openai-harmony.
    """

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    constrain: str = "<|constrain|>"
    message: str = "<|message|>"
    end: str = "<|end|>"
    call: str = "<|call|>"
    final: str = "<|return|>"

    @property
    def marks(self) -> tuple[str, ...]:
        return msgspec.structs.astuple(self)

    @property
    def ends(self) -> tuple[str, ...]:
        """The marks that end a part; small models may begin the next one at once."""
        return (self.end, self.call, self.final, self.start, self.channel)


class MessageSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """The marks around the parts of a model's messages; the rest is content.

    Attributes:
        reasoning: marks of reasoning at the start of a message; None if the model has none.
        is_reasoning_open: whether the prompt ends inside reasoning.
        tool_calls: None if calls are content like the rest.
        channels: of models that write harmony; they have neither of the others.
        is_calling: whether calls on a channel are calls; without tools, they are content.
        tools: the tools that may be called, by name, with types if the syntax needs them; a call
            of another name is text. None if any name may be a tool's.
    """

    reasoning: Marks | None = None
    is_reasoning_open: bool = False
    tool_calls: ToolCallSyntax | None = None
    channels: Channels | None = None
    is_calling: bool = True
    tools: dict[str, ToolParameters] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return self.reasoning is None and self.tool_calls is None and self.channels is None

    def without_calls(self) -> "MessageSyntax":
        return msgspec.structs.replace(self, tool_calls=None, is_calling=False)

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks, which are not part of the text that they enclose."""
        return tuple(mark for mark in self._all_marks() if mark)

    def _all_marks(self) -> Iterator[str]:
        if self.reasoning is not None:
            yield from (self.reasoning.begin, self.reasoning.end)
        if self.tool_calls is not None:
            yield from self.tool_calls.marks
        if self.channels is not None:
            yield from self.channels.marks
