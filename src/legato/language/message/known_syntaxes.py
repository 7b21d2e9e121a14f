"""The syntaxes of known families of models, and how a checkpoint shows its own.

Chat templates show the marks, as they write past messages with them. A template that only the
model's makers complete by code of their own leaves the tokens of its vocabulary to go by.
"""

import re
from collections.abc import Callable
from typing import Any

import msgspec

from legato.language.message.message_syntax import (
    ArgumentTags,
    Channels,
    JsonCall,
    Marks,
    MessageSyntax,
    NamedCall,
    ToolCallSyntax,
)

_READS_TOOLS = re.compile(r"\{[{%][^{}]*\b(?:xml_)?tools\b")
_ARGUMENT_TEXT = re.compile(
    r"""[+~]\s*[\w.]+(?:\[['"]\w+['"]\])*[.\['"]+arguments\b['"\]]*(?!\s*\|)\s*[+~}-]"""
)
_THINKING = re.compile(r"""(?:\.|\[['"])thinking\b|['"]thinking['"] in """)

HERMES = ToolCallSyntax(begin="<tool_call>", end="</tool_call>", space="\n", separator="\n")
"""Of Nous Hermes, Qwen and SmolLM; also taught to models without a syntax of their own."""
LLAMA = ToolCallSyntax(
    begin="<|python_tag|>", call=JsonCall("parameters"), is_bare=True, separator="; "
)
MISTRAL = ToolCallSyntax(begin="[TOOL_CALLS]", is_list=True, id_chars=9)
MISTRAL_NAMED = ToolCallSyntax(
    begin="[TOOL_CALLS]", call=NamedCall(id_begin="[CALL_ID]", name_end="[ARGS]"), id_chars=9
)
GRANITE = ToolCallSyntax(begin="<|tool_call|>", is_list=True)
QWEN_CODER = ToolCallSyntax(
    begin="<tool_call>",
    end="</tool_call>",
    call=NamedCall(
        begin="<function=",
        name_end=">",
        arguments=ArgumentTags(begin="<parameter=", name_end=">", end="</parameter>", padding="\n"),
        end="</function>",
    ),
    space="\n",
    separator="\n",
)
"""Of Qwen3-Coder and Qwen3.5."""
_GLM_TAGS = ArgumentTags(
    begin="<arg_key>", name_end="</arg_key>", value_begin="<arg_value>", end="</arg_value>"
)
GLM = ToolCallSyntax(
    begin="<tool_call>", end="</tool_call>", call=NamedCall(arguments=_GLM_TAGS), separator="\n"
)
GLM_COMPACT = ToolCallSyntax(
    begin="<tool_call>",
    end="</tool_call>",
    call=NamedCall(arguments=msgspec.structs.replace(_GLM_TAGS, space="")),
)
"""Of GLM-4.7, which writes no line breaks."""
MINIMAX = ToolCallSyntax(
    begin="<minimax:tool_call>",
    end="</minimax:tool_call>",
    call=NamedCall(
        begin='<invoke name="',
        name_end='">',
        arguments=ArgumentTags(begin='<parameter name="', name_end='">', end="</parameter>"),
        end="</invoke>",
    ),
    is_shared=True,
    space="\n",
    separator="\n",
)


def _dsml(section: str) -> ToolCallSyntax:
    return ToolCallSyntax(
        begin=f"<｜DSML｜{section}>",
        end=f"</｜DSML｜{section}>",
        call=NamedCall(
            begin='<｜DSML｜invoke name="',
            name_end='">',
            arguments=ArgumentTags(
                begin='<｜DSML｜parameter name="',
                name_end='">',
                end="</｜DSML｜parameter>",
                text_attribute='" string="',
            ),
            end="</｜DSML｜invoke>",
        ),
        is_shared=True,
        space="\n",
        separator="\n",
    )


DSML = _dsml("function_calls")
"""Of DeepSeek V3.2."""
DSML_TOOLS = _dsml("tool_calls")
"""Of DeepSeek V4."""
DEEPSEEK = ToolCallSyntax(
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    call=NamedCall(
        begin="<｜tool▁call▁begin｜>", name_end="<｜tool▁sep｜>", end="<｜tool▁call▁end｜>"
    ),
    is_shared=True,
)
"""Of DeepSeek V3.1."""
DEEPSEEK_FENCED = ToolCallSyntax(
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    call=NamedCall(
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        name_end="\n```json\n",
        end="\n```<｜tool▁call▁end｜>",
    ),
    is_shared=True,
    separator="\n",
)
"""Of DeepSeek V3 and R1."""
KIMI = ToolCallSyntax(
    begin="<|tool_calls_section_begin|>",
    end="<|tool_calls_section_end|>",
    call=NamedCall(
        begin="<|tool_call_begin|>functions.",
        id_begin=":",
        id_pattern="functions.{name}:{id}",
        name_end="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
    ),
    is_shared=True,
)
GEMMA = ToolCallSyntax(
    begin="<|tool_call>", end="<tool_call|>", call=NamedCall(begin="call:", arguments="gemma")
)
"""Of Gemma 4."""
LFM = ToolCallSyntax(
    begin="<|tool_call_start|>",
    end="<|tool_call_end|>",
    call=NamedCall(arguments="python"),
    is_list=True,
)
LFM_JSON = ToolCallSyntax(begin="<|tool_call_start|>", end="<|tool_call_end|>", is_list=True)
HARMONY = MessageSyntax(channels=Channels())
"""Of gpt-oss."""

_REASONING = (
    Marks("<think>", "</think>"),
    Marks("[THINK]", "[/THINK]"),
    Marks("<|channel>thought\n", "<channel|>"),
)
_HARMONY = ("<|channel|>", "<|message|>")
_TOOL_CALLS = (  # strings in a template, the most specific first
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_NAMED),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<minimax:tool_call>",), MINIMAX),
    (("｜DSML｜", "function_calls"), DSML),
    (("｜DSML｜",), DSML_TOOLS),
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_FENCED),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK),
    (("<|tool_calls_section_begin|>",), KIMI),
    (("<|tool_call>", "<tool_call|>"), GEMMA),
    (("<|tool_call_start|>", '{"name"'), LFM_JSON),
    (("<|tool_call_start|>",), LFM),
    (("<tool_call>", "<function="), QWEN_CODER),
    (("<tool_call>", "<arg_key>", "{function-name}<arg_key>"), GLM_COMPACT),
    (("<tool_call>", "<arg_key>"), GLM),
    (("<tool_call>",), HERMES),
    (("<|tool_call|>",), GRANITE),
    (("<|python_tag|>",), LLAMA),
    (("<|eot_id|>", '"parameters"'), LLAMA),
)
_OF_TOKENS = (MINIMAX, DEEPSEEK, KIMI, GEMMA, LFM, GRANITE)
"""Syntaxes that the first mark alone tells, if it is a token of the vocabulary."""


def syntax_of(
    chat_template: str, is_token: Callable[[str], bool] = lambda _: False
) -> MessageSyntax:
    """Return the syntax of models with this chat template; tool calls default to Hermes'.

    Args:
        is_token: whether a text is a token of the vocabulary.
    """
    if all(mark in chat_template for mark in _HARMONY):
        return HARMONY
    return MessageSyntax(
        reasoning=next((marks for marks in _REASONING if marks.end in chat_template), None),
        tool_calls=_tool_calls(chat_template, is_token),
    )


def _tool_calls(chat_template: str, is_token: Callable[[str], bool]) -> ToolCallSyntax:
    for telling, syntax in _TOOL_CALLS:
        if all(text in chat_template for text in telling):
            return syntax
    return next((syntax for syntax in _OF_TOKENS if is_token(syntax.begin)), HERMES)


def reads_tools(chat_template: str) -> bool:
    """Whether a chat template shows tools to the model."""
    return _READS_TOOLS.search(chat_template) is not None


def reads_tool_calls(chat_template: str) -> bool:
    """Whether a chat template writes tool calls of past messages."""
    return "tool_calls" in chat_template


def reads_argument_text(chat_template: str) -> bool:
    """Whether a chat template joins a call's arguments to other text, as only JSON text can be."""
    return _ARGUMENT_TEXT.search(chat_template) is not None


def reads_thinking(chat_template: str) -> bool:
    """Whether a chat template reads a message's reasoning from `thinking` alone."""
    has_others = "reasoning_content" in chat_template
    return not has_others and _THINKING.search(chat_template) is not None


_MAX_MARK_CHARS = 64
_REASONING_FIELDS = ("thinking", "reasoning_content", "reasoning")


class _Field(msgspec.Struct):
    """A field of the template under transformers' names; one of another type is ignored."""

    open: str
    close: str | None = None
    content: str = "text"
    transform: Any = None
    transform_each: bool = False

    @property
    def marks(self) -> Marks | None:
        marks = Marks(self.open, self.close or "")
        has_both = 0 < len(marks.begin) <= _MAX_MARK_CHARS >= len(marks.end)
        return marks if has_both else None


def declared_syntax(response_template: object, recognised: MessageSyntax) -> MessageSyntax:
    """Return `recognised` with the marks that a template declares as literals.

    Args:
        response_template: the value in tokenizer_config.json, of any type.
        recognised: the syntax found in the chat template; it stays where nothing is declared.
    """
    fields = response_template.get("fields") if isinstance(response_template, dict) else None
    if not isinstance(fields, dict):
        return recognised
    reasoning = next(
        filter(None, (_reasoning(fields.get(name)) for name in _REASONING_FIELDS)), None
    )
    return msgspec.structs.replace(
        recognised,
        reasoning=reasoning or recognised.reasoning,
        tool_calls=_declared_tool_calls(fields.get("tool_calls"), recognised.tool_calls),
    )


def _reasoning(value: object) -> Marks | None:
    field = _field(value)
    marks = field.marks if field else None
    return marks if marks and marks.end else None


def _declared_tool_calls(value: object, recognised: ToolCallSyntax | None) -> ToolCallSyntax | None:
    field = _field(value)
    marks = field.marks if field else None
    if field is None or marks is None or field.content != "json":
        return recognised
    known = recognised if recognised and isinstance(recognised.call, JsonCall) else None
    if known is not None and (known.begin, known.end) == (marks.begin, marks.end):
        return known
    has_parameters = "parameters" in repr(field.transform)
    return ToolCallSyntax(
        begin=marks.begin,
        end=marks.end,
        call=JsonCall("parameters" if has_parameters else "arguments"),
        is_list=field.transform_each,
        space="" if field.transform_each else "\n",
        separator="\n",
    )


def _field(value: object) -> _Field | None:
    try:
        return msgspec.convert(value, _Field)
    except msgspec.ValidationError:
        return None
