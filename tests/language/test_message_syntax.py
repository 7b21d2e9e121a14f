"""How models write messages: told by chat templates, and by what checkpoints declare."""

from typing import Any

import pytest

from legato.language.message import known_syntaxes
from legato.language.message.known_syntaxes import (
    HARMONY,
    HERMES,
    KIMI,
    LFM,
    LLAMA,
    MISTRAL,
    QWEN_CODER,
    declared_syntax,
    reads_argument_text,
    reads_thinking,
    reads_tool_calls,
    reads_tools,
    syntax_of,
)
from legato.language.message.message_syntax import JsonCall, Marks, MessageSyntax, ToolCallSyntax
from tests.api import chat_templates


def test_templates_are_told_apart() -> None:
    assert syntax_of(chat_templates.LLAMA).tool_calls == LLAMA
    assert syntax_of(chat_templates.MISTRAL).tool_calls == MISTRAL
    assert syntax_of(chat_templates.NO_TOOLS) == MessageSyntax(tool_calls=HERMES)
    assert syntax_of("{{ x.split('[/THINK]') }}").reasoning == Marks("[THINK]", "[/THINK]")
    for name, template in chat_templates.FAMILIES.items():
        known = getattr(known_syntaxes, name.upper())
        told = syntax_of(template)
        assert (told if known is HARMONY else told.tool_calls) == known, name


def test_tokens_tell_what_a_template_does_not() -> None:
    for syntax in (KIMI, LFM):
        assert syntax_of(chat_templates.NO_TOOLS, {syntax.begin}.__contains__).tool_calls == syntax
    assert syntax_of(chat_templates.QWEN_CODER, {KIMI.begin}.__contains__).tool_calls == QWEN_CODER


def test_templates_that_read_messages_in_their_own_way() -> None:
    for name, template in chat_templates.KNOWING_TOOLS.items():
        assert reads_argument_text(template) == name.startswith("deepseek"), name
        assert reads_thinking(template) == (name in ("lfm", "harmony")), name
    for text in ("{{ 'a' ~ c.arguments ~ 'b' }}", "{{ x + tool['function']['arguments'] }}"):
        assert reads_argument_text(text)
    for text in ("{{ a + c.arguments | tojson }}", "{% for k, v in c.arguments.items() %}"):
        assert not reads_argument_text(text)


def test_templates_that_read_tools() -> None:
    for template in chat_templates.KNOWING_TOOLS.values():
        assert reads_tools(template)
        assert reads_tool_calls(template)
    assert not reads_tools(chat_templates.NO_TOOLS)
    assert not reads_tools("You have tools.{{ message }}{% if a %} tools {% endif %}")
    assert reads_tools("{% for tool in xml_tools %}{% endfor %}")


def declared(**fields: Any) -> MessageSyntax:
    return declared_syntax(
        {"start_anchor": "x", "fields": fields}, MessageSyntax(tool_calls=HERMES)
    )


def test_what_a_checkpoint_declares() -> None:
    calls = {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True}
    assert declared(tool_calls=calls).tool_calls is HERMES
    each = {"function": {"name": "{name}", "arguments": "{parameters}"}}
    calls = {"open": "<|call|>", "content": "json", "transform": [each], "transform_each": True}
    assert declared(
        thinking={"open": "<r>", "close": "</r>"}, tool_calls=calls, content={"close": "</s>"}
    ) == MessageSyntax(
        reasoning=Marks("<r>", "</r>"),
        tool_calls=ToolCallSyntax(
            begin="<|call|>", call=JsonCall("parameters"), is_list=True, separator="\n"
        ),
    )


@pytest.mark.parametrize(
    "field",
    [
        {"open_pattern": "(a+)+b", "close": "</a>", "content": "json"},
        {"open": ["a", "b"], "close": "</a>", "content": "json"},
        {"open": "<a>", "close": ["</a>", "</s>"], "content": "json"},
        {"open": "<a>", "close": "</a>", "content": "xml-inline"},
        {"open": "", "close": "</a>", "content": "json"},
        {"open": "<" * 65, "close": "</a>", "content": "json"},
        {"open": "<a>", "close": "<" * 65, "content": "json"},
        {"open": 5},
        [],
        None,
    ],
)
def test_what_is_not_literal_is_left(field: Any) -> None:
    expected = MessageSyntax(tool_calls=HERMES)
    assert declared(tool_calls=field) == expected


@pytest.mark.parametrize(
    "template", [None, [], "x", {}, {"fields": 5}, {"fields": {"thinking": 1}}]
)
def test_what_is_no_response_template_is_left(template: Any) -> None:
    expected = MessageSyntax(tool_calls=HERMES)
    assert declared_syntax(template, expected) is expected or (
        declared_syntax(template, expected) == expected
    )
