"""Messages that families' chat templates write are read back, by Legato and by transformers."""

from functools import cache
from typing import Any

import msgspec
import pytest
from transformers.utils.chat_parsing import parse_response

from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL
from legato.core.outputs import FinishReason
from legato.language.conversation.template import ChatTemplates
from legato.language.message.message import Message, read_message
from legato.language.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.api import chat_templates

_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "is_hourly": {"type": "boolean"},
                    "place": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                    "tags": {"type": "array"},
                },
            },
        },
    }
]
_ARGUMENTS: list[dict[str, Any]] = [
    {"city": "São\n Paulo, 12", "days": 3, "is_hourly": True, "tags": ["a", {"b": None}]},
    {"city": "true", "place": {"lat": -1.5}},
    {},
]
_ONE_CALL = ("harmony",)
_STARTS, _END = ("<|im_start|>", "<|start|>"), "<|im_end|>"


@cache
def _tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_source(DEFAULT_MODEL))


def _call(i: int, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": f"functions.get_weather:{i}", "type": "function", "function": function}


def _transcript(template: str, calls: list[dict[str, Any]], **message: Any) -> tuple[str, Message]:
    """Return an assistant's message as the template writes it, and as Legato reads it."""
    asked = [{"role": "user", "content": "How is it?"}]
    answer = {"role": "assistant", "content": "", "tool_calls": calls, **message}

    chat = ChatTemplates(_tokenizer()).get(template, has_tools=True)

    def rendered(messages: list[dict[str, Any]], *, is_open: bool) -> tuple[str, Any]:
        options = {"add_generation_prompt": is_open}
        text, _ = chat.render(messages, _TOOLS, options=options)
        return text, chat.reply_syntax(text, _TOOLS)

    before, syntax = rendered(asked, is_open=True)
    # Tools are shown in the last message, which the answer is not to be.
    after, _ = rendered([*asked, answer, {"role": "user", "content": ""}], is_open=False)
    start = next(mark for mark in _STARTS if mark in before)
    begin = before[before.rindex(start) :]
    text = after.partition(begin)[2].rpartition(f"{start}user")[0].rstrip().removesuffix(_END)
    return text, read_message(text, FinishReason.STOP, syntax)


def _arguments(message: Message) -> list[Any]:
    return [msgspec.json.decode(call.arguments) for call in message.tool_calls]


@pytest.mark.parametrize("name", chat_templates.FAMILIES)
def test_a_familys_transcript_is_read_back(name: str) -> None:
    template = chat_templates.FAMILIES[name]
    many = _ARGUMENTS[:1] if name in _ONE_CALL else _ARGUMENTS
    if name == "lfm":  # its template writes strings without escapes
        many = [{**many[0], "city": "it's 12"}, *many[1:]]
    calls = [_call(i, arguments) for i, arguments in enumerate(many)]
    text, message = _transcript(template, calls)
    assert [call.name for call in message.tool_calls] == ["get_weather"] * len(many), text
    assert _arguments(message) == many
    assert (message.content, message.finish_reason) == (None, "tool_calls")
    if name == "granite":
        return
    thought = "It <asks>.\n"
    text, message = _transcript(template, calls, reasoning_content=thought)
    assert message.reasoning == thought.strip(), text
    assert _arguments(message) == many
    _, message = _transcript(template, [], content="Sunny.", reasoning_content=thought)
    assert (message.content, message.reasoning) == ("Sunny.", thought.strip())


_FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_THINKING = {"open": "<think>", "close": "</think>"}
_RESPONSE_TEMPLATES: dict[str, dict[str, Any]] = {
    "qwen_coder": {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>\w+)>\n(?P<value>.*?)\n</parameter>",
        },
        "transform": _FUNCTION,
    },
    "glm": {
        "open_pattern": r"<tool_call>(?P<name>\w+)",
        "close": "</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<arg_key>(?P<key>\w+)</arg_key>\s*"
            r"<arg_value>(?P<value>.*?)</arg_value>"
        },
        "transform": _FUNCTION,
    },
    "minimax": {
        "open_pattern": r'<invoke name="(?P<name>\w+)">',
        "close": "</invoke>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r'<parameter name="(?P<key>\w+)">(?P<value>.*?)</parameter>'
        },
        "transform": _FUNCTION,
    },
    "gemma": {
        "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
        "close": "<tool_call|>",
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        "transform": _FUNCTION,
    },
    "deepseek": {
        "open_pattern": r"<｜tool▁call▁begin｜>(?P<name>\w+)<｜tool▁sep｜>",
        "close": "<｜tool▁call▁end｜>",
        "content": "json",
        "transform": _FUNCTION,
    },
    "kimi": {
        "open_pattern": r"<\|tool_call_begin\|>functions\.(?P<name>\w+):\d+"
        r"<\|tool_call_argument_begin\|>",
        "close": "<|tool_call_end|>",
        "content": "json",
        "transform": _FUNCTION,
    },
}
"""How transformers' parser reads the calls of a family; key a name in `FAMILIES`."""


@pytest.mark.parametrize("name", _RESPONSE_TEMPLATES)
def test_transformers_reads_the_same(name: str) -> None:
    calls = [_call(i, arguments) for i, arguments in enumerate(_ARGUMENTS)]
    text, message = _transcript(chat_templates.FAMILIES[name], calls)
    parsed = parse_response(
        text,
        {
            "start_anchor": "assistant\n",
            "fields": {
                "tool_calls": {**_RESPONSE_TEMPLATES[name], "repeats": True},
                "thinking": _THINKING,
            },
        },
        prefix="",
        tools=_TOOLS,
    )
    theirs = [call["function"]["arguments"] for call in parsed["tool_calls"]]
    assert _arguments(message) == theirs == _ARGUMENTS
