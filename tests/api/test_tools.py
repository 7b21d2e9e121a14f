"""Tools: calls that are wanted, whole and streamed, and histories with calls in them."""

import json
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel, ValidationError

from legato.api.bodies.chat_messages import ChatMessage, TemplateOptions
from legato.api.bodies.chat_tools import Tool, functions_of
from legato.api.limits import (
    MAX_TOOL_CALLS,
    MAX_TOOL_NAME_CHARS,
    MAX_TOOLS,
    MAX_TOOLS_CHARS,
)
from legato.language.conversation.prompt import tools_for_template
from tests.api.launch import MODEL

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"$ref": "#/$defs/unit"},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"unit": {"enum": ["celsius", "fahrenheit"]}},
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}


def check_call(call: Any, name: str) -> None:
    assert call.type == "function"
    assert call.id.startswith("call_")
    check_function(call.function, name)


def check_function(function: Any, name: str) -> None:
    assert function.name == name
    arguments = json.loads(function.arguments)
    if name == "get_weather":
        assert arguments.keys() == {"city", "unit"}
        assert len(arguments["city"]) <= 20
        assert arguments["unit"] in ("celsius", "fahrenheit")
    else:
        assert arguments == {}


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[Any, list[Any]]:
    """The message that the chunks of a stream are, by the client's own putting together."""
    chunks = []
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, **fields) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        return stream.get_final_completion().choices[0], chunks


@pytest.mark.parametrize(
    ("choice", "name", "is_streamed", "temperature"),
    [
        ("required", "get_weather", True, 0.0),
        ("required", "get_weather", False, 1.3),
        ({"type": "function", "function": {"name": "get_time"}}, "get_time", True, 1.3),
    ],
)
def test_a_call_that_is_wanted_comes(
    client: openai.OpenAI, choice: Any, name: str, is_streamed: bool, temperature: float
) -> None:
    tools = [WEATHER] if choice == "required" else [WEATHER, TIME]
    fields: dict[str, Any] = {
        "tools": tools,
        "tool_choice": choice,
        "temperature": temperature,
        "seed": 1,
        "parallel_tool_calls": False,
    }
    if is_streamed:
        answer, chunks = streamed(client, **fields)
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert deltas[0].role == "assistant"
        assert sum(bool(delta.tool_calls) for delta in deltas) > (3 if name == "get_weather" else 0)
    else:
        completion = client.chat.completions.create(model=MODEL, messages=QUESTION, **fields)
        answer = completion.choices[0]
    assert answer.finish_reason == "tool_calls"
    assert not answer.message.content
    [call] = answer.message.tool_calls
    check_call(call, name)


def test_each_choice_has_its_calls(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        n=2,
        seed=7,
        logprobs=True,
    )
    ids = set()
    for choice in completion.choices:
        assert choice.message.tool_calls is not None
        [call] = choice.message.tool_calls
        check_call(call, "get_weather")
        ids.add(call.id)
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        text = "".join(entry.token for entry in choice.logprobs.content)
        assert "<tool_call>" in text
    assert len(ids) == 2


def test_a_call_that_does_not_fit_is_cut_off(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[WEATHER], tool_choice="required", max_tokens=16
    )
    assert completion.choices[0].finish_reason == "length"


def test_a_stop_string_may_end_a_call(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[WEATHER], tool_choice="required", stop='"city"'
    )
    choice = completion.choices[0]
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.arguments == "{"
    assert choice.model_extra is not None
    assert choice.model_extra["stop_reason"] == '"city"'


class Weather(BaseModel):
    """The weather in a city."""

    city: str


def test_openai_parses_strict_tools(client: openai.OpenAI) -> None:
    completion = client.chat.completions.parse(
        model=MODEL,
        messages=QUESTION,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=200,
    )
    calls = completion.choices[0].message.tool_calls
    assert calls is not None
    assert isinstance(calls[0].function.parsed_arguments, Weather)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_model_may_answer_instead(client: openai.OpenAI, choice: Any) -> None:
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    completion = client.chat.completions.create(
        model=MODEL,
        messages=question,
        tools=[TIME],
        tool_choice=choice,
        temperature=0,
        max_tokens=30,
    )
    message = completion.choices[0].message
    assert message.tool_calls is None
    assert message.content


def test_none_shows_no_tools(http: httpx.Client) -> None:
    """Without tools in its prompt, a model calls none."""
    usages = [
        http.post(
            "/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 1, **fields}
        ).json()["usage"]["prompt_tokens"]
        for fields in ({}, {"tools": [TIME], "tool_choice": "none"}, {"tools": [TIME]})
    ]
    assert usages[0] == usages[1]
    assert usages[2] > usages[0] + 50


def test_an_answer_with_calls_can_be_sent_back(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "tools": [WEATHER], "max_tokens": 100}
    answer = client.chat.completions.create(
        messages=QUESTION, tool_choice="required", parallel_tool_calls=False, **asked
    )
    message = answer.choices[0].message
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny, 25°C"}
    for history in (message, message.model_dump(), message.model_dump(exclude_unset=True)):
        again = client.chat.completions.create(
            messages=[*QUESTION, history, result], **{**asked, "max_tokens": 1}
        )
        assert again.choices[0].message.role == "assistant"


def test_history_of_litellm(http: httpx.Client) -> None:
    """It sends keys along that the API does not know, and empty ones."""
    message = ChatCompletionMessage(role="assistant", content="Hello").model_dump()
    message |= {
        "provider_specific_fields": {"refusal": None, "a": [1]},
        "annotations": [],
        "tool_calls": [],
        "reasoning_content": None,
        "thinking_blocks": [],
        "images": [],
    }
    tokenized = [
        http.post("/tokenize", json={"messages": [*QUESTION, answer, *QUESTION]}).json()
        for answer in (message, {"role": "assistant", "content": "Hello"})
    ]
    assert tokenized[0]["tokens"] == tokenized[1]["tokens"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_functions(http: httpx.Client, is_streamed: bool) -> None:
    asked = {
        "messages": QUESTION,
        "functions": [WEATHER["function"], TIME["function"]],
        "function_call": {"name": "get_weather"},
        "temperature": 0,
        "stream": is_streamed,
    }
    response = http.post("/v1/chat/completions", json=asked)
    if is_streamed:
        lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        pieces = [choice["delta"].get("function_call", {}) for choice in choices]
        function = {
            "name": "".join(piece.get("name", "") for piece in pieces),
            "arguments": "".join(piece.get("arguments", "") for piece in pieces),
        }
        reason = choices[-1]["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        function, reason = choice["message"]["function_call"], choice["finish_reason"]
    assert reason == "function_call"
    check_function(ChatCompletionMessage.model_validate(
        {"role": "assistant", "function_call": function}
    ).function_call, "get_weather")  # fmt: skip
    history = [
        *QUESTION,
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "get_weather", "content": "Sunny"},
    ]
    again = http.post("/v1/chat/completions", json={"messages": history, "max_tokens": 1})
    assert again.status_code == 200


def tool(**function: Any) -> dict[str, Any]:
    return {"tools": [TIME, {"type": "function", "function": {"name": "f", **function}}]}


def calling(num_calls: int) -> dict[str, Any]:
    """A message with so many calls."""
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * num_calls}


def test_tools_at_their_limits() -> None:
    names = [f"{i:0>{MAX_TOOL_NAME_CHARS}}" for i in range(MAX_TOOLS)]
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    functions = functions_of(list(map(Tool.model_validate, tools)))
    size = len(msgspec.json.encode(tools_for_template(functions)))
    tools[0]["function"] = {"name": names[0], "description": "a" * (MAX_TOOLS_CHARS - size)}
    options = TemplateOptions.model_validate({"tools": tools})
    assert options.tools is not None
    assert len(options.tools) == MAX_TOOLS
    ChatMessage.model_validate(calling(MAX_TOOL_CALLS))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [TIME] * (MAX_TOOLS + 1)}, "tools"),
        ({"tools": [TIME, TIME]}, "tools.1.function.name"),
        (tool(name=""), "tools.1.function.name"),
        (tool(name="a b"), "tools.1.function.name"),
        (tool(name="a" * (MAX_TOOL_NAME_CHARS + 1)), "tools.1.function.name"),
        (tool(description="a" * MAX_TOOLS_CHARS), "tools"),
        ({"messages": [calling(MAX_TOOL_CALLS + 1)]}, "messages.0.tool_calls"),
        (tool(parameters=[]), "tools.1.function.parameters"),
        (tool(parameters={"type": "string"}), "tools.1.function.parameters.type"),
        (
            tool(parameters={"properties": {"a": {"type": "text"}}}),
            "tools.1.function.parameters.properties.a.type",
        ),
        (
            tool(parameters={"properties": {"a": {"anyOf": [{}, 5]}}}),
            "tools.1.function.parameters.properties.a.anyOf.1",
        ),
        (tool(parameters={"required": "a"}), "tools.1.function.parameters.required"),
        ({"tools": [TIME], "tool_choice": "always"}, "tool_choice"),
        (
            {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
        ),
        ({"tools": [TIME], "functions": [TIME["function"]]}, "functions"),
    ],
)
def test_invalid_tools(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    response = http.post("/v1/chat/completions", json={"messages": QUESTION, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_deep_schema_is_refused_where_it_is_wrong() -> None:
    schema: dict[str, Any] = {"type": "text"}
    path = []
    for _ in range(50):
        schema = {"properties": {"a": schema}}
        path += ["properties", "a"]
    with pytest.raises(ValidationError) as raised:
        Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": schema}})
    cause = raised.value.errors()[0]["ctx"]["error"]
    assert cause.path == (*path, "type")


@pytest.mark.parametrize(
    ("strict", "param"), [(True, "tools.1.function.parameters"), (False, None)]
)
def test_a_strict_schema_that_cannot_be_held_to_is_refused(
    http: httpx.Client, strict: bool, param: str | None
) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "format": "no-such"}}}
    body = {"messages": QUESTION, "max_tokens": 1, **tool(parameters=parameters, strict=strict)}
    response = http.post("/v1/chat/completions", json={**body, "tool_choice": "required"})
    if param is None:
        assert response.status_code == 200
    else:
        error = response.json()["error"]
        assert error["param"] == param
        assert "#/properties/a" in error["message"]


def test_content_of_a_form_beside_tools(client: openai.OpenAI) -> None:
    """The model may call or answer; the answer has the form."""
    completion = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        tools=[TIME],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"enum": ["sunny", "rainy"]}},
        },
        n=4,
        temperature=1.3,
        seed=2,
    )
    for choice in completion.choices:
        if choice.message.tool_calls:
            check_call(choice.message.tool_calls[0], "get_time")
        else:
            assert choice.message.content in ('"sunny"', '"rainy"')
