"""Required calls in the syntax of several families, by a model that has never seen most of them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server import chat_templates
from tests.server.launch import MODEL, ServerProcess, running_server
from tests.server.test_tools import QUESTION, TIME, WEATHER, check_call


@pytest.fixture(scope="module")
def trusting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("trusting")
    with running_server(folder, "--trust-request-chat-template") as process:
        yield process


@pytest.mark.parametrize("template", chat_templates.KNOWING_TOOLS)
def test_required_calls(trusting: ServerProcess, template: str) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "tools": [WEATHER, TIME],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "seed": 3,
        "extra_body": {"chat_template": chat_templates.KNOWING_TOOLS[template]},
    }
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


def test_a_model_may_reason_before_it_calls(trusting: ServerProcess) -> None:
    """This one is made to, and held to end with a call, however long that takes."""
    answer = trusting.openai().chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        tools=[TIME],
        tool_choice="required",
        parallel_tool_calls=False,
        reasoning_effort="high",
        logit_bias={"28": 5},  # "<", so that it comes to an end
        max_tokens=400,
        seed=1,
        extra_body={"chat_template": chat_templates.QWEN},
    )
    message = answer.choices[0].message
    assert not message.content
    extra = message.model_extra or {}
    assert extra["reasoning_content"] == extra["reasoning"]
    if answer.choices[0].finish_reason == "tool_calls":
        [call] = message.tool_calls or []
        check_call(call, "get_time")
