"""How models write messages: where reasoning and tool calls stand in the text.

A checkpoint says so in its chat template alone, which writes a history with the same marks.
"""

import re

import msgspec

_READS_TOOLS = re.compile(r"\{[{%][^{}]*\b(?:xml_)?tools\b")


class Marks(msgspec.Struct, frozen=True):
    """What stands around a part of a message."""

    begin: str
    end: str


class ToolCallSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """How a model calls tools: in sections, each with one call, or several.

    Attributes:
        begin, end: of a section; an empty end is that of the message.
        arguments_key: a call is a JSON object of "name" and this, or a list of such objects.
        name_end: stands between a call's name and its arguments, where it is no such object.
        id_begin: stands between its name and an id before `name_end`, where there is one.
        is_list: whether a section's calls are a list even where it is one alone.
        is_bare: whether a message that is such an object is a call, without `begin`.
        separator: between sections, or between the calls of a section that the message ends.
        id_chars: length of a call's id, where the chat template insists on one.
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
    """What a model writes around the parts of its messages; the rest is content.

    Attributes:
        reasoning: around what comes before everything else, if it does; None where it never does.
        is_reasoning_open: whether the prompt has ended within it.
        tool_calls: None where calls are content like the rest.
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
        """All texts that are no part of what they stand around."""
        reasoning, calls = self.reasoning, self.tool_calls
        of_reasoning = (reasoning.begin, reasoning.end) if reasoning else ()
        of_calls = (calls.begin, calls.end, calls.name_end, calls.id_begin) if calls else ()
        return tuple(mark for mark in (*of_reasoning, *of_calls) if mark)


HERMES = ToolCallSyntax(begin="<tool_call>", end="</tool_call>")
"""Nous Hermes', and that of Qwen and SmolLM; what a model is told to use that has no other."""
LLAMA = ToolCallSyntax(
    begin="<|python_tag|>", arguments_key="parameters", is_bare=True, separator="; "
)
MISTRAL = ToolCallSyntax(begin="[TOOL_CALLS]", is_list=True, separator="", id_chars=9)
MISTRAL_NAMED = ToolCallSyntax(
    begin="[TOOL_CALLS]", name_end="[ARGS]", id_begin="[CALL_ID]", separator="", id_chars=9
)

_REASONING = (Marks("<think>", "</think>"), Marks("[THINK]", "[/THINK]"))
_TOOL_CALLS = (  # what a template has in it, the most telling first
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_NAMED),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<tool_call>",), HERMES),
    (("<|python_tag|>",), LLAMA),
    (("<|eot_id|>", '"parameters"'), LLAMA),
)


def syntax_of(chat_template: str) -> MessageSyntax:
    """What a model with this chat template writes; unknown tool calls are taken for Hermes'."""
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
    """Whether a chat template tells the model of tools."""
    return _READS_TOOLS.search(chat_template) is not None


def reads_tool_calls(chat_template: str) -> bool:
    """Whether a chat template writes the tool calls of a history."""
    return "tool_calls" in chat_template
