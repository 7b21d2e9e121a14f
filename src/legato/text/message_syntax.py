"""How models mark reasoning and tool calls in the text of a message.

A checkpoint shows the marks only in its chat template, which writes past messages with them.
"""

import re

import msgspec

_READS_TOOLS = re.compile(r"\{[{%][^{}]*\b(?:xml_)?tools\b")


class Marks(msgspec.Struct, frozen=True):
    """The text before and after a part of a message."""

    begin: str
    end: str


class ToolCallSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """How a model calls tools: in sections, each with one call or several.

    Attributes:
        begin, end: of a section; an empty `end` means the end of the message.
        arguments_key: a call is a JSON object of "name" and this key, or a list of such objects.
        name_end: text between a call's name and its arguments, if calls are no JSON objects.
        id_begin: text between a call's name and its id before `name_end`, if calls have ids.
        is_list: whether a section always holds a list of calls, even of one.
        is_bare: whether a message that is one such object is a call, without `begin`.
        separator: between sections, or between calls in a section that ends with the message.
        id_chars: length of a call's id, if the chat template requires one.
    """

    begin: str
    end: str = ""
    arguments_key: str = "arguments"
    name_end: str = ""
    id_begin: str = ""
    is_list: bool = False
    is_bare: bool = False
    separator: str = "\n"
    id_chars: int | None = None


class MessageSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """The marks around the parts of a model's messages; the rest is content.

    Attributes:
        reasoning: marks of reasoning at the start of a message; None if the model has none.
        is_reasoning_open: whether the prompt ends inside reasoning.
        tool_calls: None if calls are content like the rest.
    """

    reasoning: Marks | None = None
    is_reasoning_open: bool = False
    tool_calls: ToolCallSyntax | None = None

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return self.reasoning is None and self.tool_calls is None

    def without_calls(self) -> "MessageSyntax":
        return msgspec.structs.replace(self, tool_calls=None)

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks, which are not part of the text that they enclose."""
        reasoning, calls = self.reasoning, self.tool_calls
        of_reasoning = (reasoning.begin, reasoning.end) if reasoning else ()
        of_calls = (calls.begin, calls.end, calls.name_end, calls.id_begin) if calls else ()
        return tuple(mark for mark in (*of_reasoning, *of_calls) if mark)


HERMES = ToolCallSyntax(begin="<tool_call>", end="</tool_call>")
"""Of Nous Hermes, Qwen and SmolLM; also taught to models without a syntax of their own."""
LLAMA = ToolCallSyntax(
    begin="<|python_tag|>", arguments_key="parameters", is_bare=True, separator="; "
)
MISTRAL = ToolCallSyntax(begin="[TOOL_CALLS]", is_list=True, separator="", id_chars=9)
MISTRAL_NAMED = ToolCallSyntax(
    begin="[TOOL_CALLS]", name_end="[ARGS]", id_begin="[CALL_ID]", separator="", id_chars=9
)

_REASONING = (Marks("<think>", "</think>"), Marks("[THINK]", "[/THINK]"))
_TOOL_CALLS = (  # strings in a template, the most specific first
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_NAMED),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<tool_call>",), HERMES),
    (("<|python_tag|>",), LLAMA),
    (("<|eot_id|>", '"parameters"'), LLAMA),
)


def syntax_of(chat_template: str) -> MessageSyntax:
    """Return the syntax of models with this chat template; tool calls default to Hermes'."""
    return MessageSyntax(
        reasoning=next((marks for marks in _REASONING if marks.end in chat_template), None),
        tool_calls=next(
            (
                syntax
                for telling, syntax in _TOOL_CALLS
                if all(text in chat_template for text in telling)
            ),
            HERMES,
        ),
    )


def reads_tools(chat_template: str) -> bool:
    """Whether a chat template shows tools to the model."""
    return _READS_TOOLS.search(chat_template) is not None


def reads_tool_calls(chat_template: str) -> bool:
    """Whether a chat template writes tool calls of past messages."""
    return "tool_calls" in chat_template
