"""Required calls in the syntax of several families, by a model that has never seen most of them."""

import json
from typing import Any

import pytest

from legato.checkpoint.source import resolve_source
from legato.language.tokenizer.tokenizer import load_tokenizer
from tests.api import chat_templates
from tests.api.launch import MODEL, ServerProcess
from tests.api.servers import TRUSTING, Servers
from tests.api.test_tools import QUESTION, TIME, WEATHER


@pytest.fixture(scope="module")
def trusting(servers: Servers) -> ServerProcess:
    return servers.get(*TRUSTING)


def _thoughtless(template: str) -> str:
    """The template of a model that does not reason: this one would go on until its tokens end."""
    return template.replace("</think>", "").replace("<channel|>", "")


def _no_analysis() -> dict[str, float]:
    """Biases against the channel on which a model reasons, for the same reason."""
    vocab = load_tokenizer(resolve_source(MODEL)).backend.get_vocab()
    return {str(token_id): -100 for text, token_id in vocab.items() if "analysis".startswith(text)}


@pytest.mark.parametrize("template", chat_templates.ONE_A_NOTATION)
def test_required_calls(trusting: ServerProcess, template: str) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "tools": [WEATHER, TIME],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "seed": 3,
        "extra_body": {"chat_template": _thoughtless(chat_templates.KNOWING_TOOLS[template])},
    }
    if template == "harmony":
        fields["logit_bias"] = _no_analysis()
    client = trusting.openai()
    whole = client.chat.completions.create(messages=QUESTION, **fields)
    message = whole.choices[0].message
    assert message.tool_calls is not None
    assert whole.choices[0].finish_reason == "tool_calls"
    [call] = message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert arguments["unit"] in ("celsius", "fahrenheit")
    with client.chat.completions.stream(messages=QUESTION, **fields) as stream:
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}
    again = client.chat.completions.create(messages=[*QUESTION, message, result], **fields)
    [call] = again.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments).keys() == {"city", "unit"}


def test_a_model_reasons_before_it_calls_or_answers(trusting: ServerProcess) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": QUESTION,
        "reasoning_effort": "high",
        "max_tokens": 12,
        "temperature": 0,
        "extra_body": {"chat_template": chat_templates.QWEN},
    }
    client = trusting.openai()
    free = client.chat.completions.create(**fields).choices[0]
    for more in (
        {"tools": [TIME], "tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
    ):
        held = client.chat.completions.create(**fields, **more).choices[0]
        for choice in (free, held):
            assert choice.finish_reason == "length"
            assert choice.message.content is None
            extra = choice.message.model_extra or {}
            assert extra["reasoning_content"]
            assert extra["reasoning_content"] == extra["reasoning"]
    chunks = client.chat.completions.create(**fields, stream=True)
    pieces = [chunk.choices[0].delta.model_extra or {} for chunk in chunks]
    reasoning = "".join(piece.get("reasoning_content", "") for piece in pieces)
    assert reasoning == (free.message.model_extra or {})["reasoning_content"]
