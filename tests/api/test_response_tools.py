"""/v1/responses with tools of Codex: in namespaces, with any text as input, and hosted ones."""

import json
import re
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.api.responses.output_items import CustomInput
from tests.api.test_errors import check
from tests.api.test_responses import WEATHER, ask, events

WEB: dict[str, Any] = {"type": "namespace", "name": "web", "tools": [WEATHER]}
DATE: dict[str, Any] = {
    "type": "custom",
    "name": "date",
    "description": "Opens the calendar at a date.",
    "format": {"type": "grammar", "syntax": "regex", "definition": r"20\d\d\n\"[0-9]{2}\" (é|ü)"},
}
_UNKNOWN: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string", "format": "no-such"}},
}
HOSTED: dict[str, Any] = {"type": "web_search", "external_web_access": False}


def test_a_tool_in_a_namespace_is_called_by_its_own_name(client: openai.OpenAI) -> None:
    fields: Any = {"tools": [WEB, DATE], "parallel_tool_calls": False}
    choice: Any = {"type": "function", "name": "get_weather", "namespace": "web"}
    first = ask(client, "What is the weather in Paris?", tool_choice=choice, **fields)
    [call] = first.output
    assert call.type == "function_call"
    assert (call.namespace, call.name) == ("web", "get_weather")
    assert json.loads(call.arguments) == {"city": "Paris"}
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    second = ask(client, [output], previous_response_id=first.id, max_output_tokens=3, **fields)
    whole: Any = [
        {"role": "user", "content": "What is the weather in Paris?"},
        call.model_dump(),
        output,
    ]
    again = ask(client, whole, max_output_tokens=3, **fields)
    assert second.usage is not None
    assert again.usage is not None
    assert second.usage.input_tokens == again.usage.input_tokens


def test_the_model_knows_the_namespace(http: httpx.Client) -> None:
    """The prompt is that of a function with the namespace before its name."""
    body = {"input": "Hi", "tools": [{**WEB, "name": name} for name in ("web", "mcp__x__")]}
    functions = [{**WEATHER, "name": f"{prefix}__get_weather"} for prefix in ("web", "mcp__x")]
    prompts = [
        http.post("/v1/responses/render", json=asked).json()["token_ids"]
        for asked in (body, {**body, "tools": functions})
    ]
    assert prompts[0] == prompts[1]


def test_a_custom_tool_takes_a_text(http: httpx.Client) -> None:
    found = events(
        http, input="Open 2024.", tools=[DATE], tool_choice="required", parallel_tool_calls=False
    )
    types = [event["type"].removeprefix("response.") for event in found]
    num_deltas = types.count("custom_tool_call_input.delta")
    assert num_deltas > 3
    assert types == [
        *("created", "in_progress", "output_item.added"),
        *["custom_tool_call_input.delta"] * num_deltas,
        *("custom_tool_call_input.done", "output_item.done", "completed"),
    ]
    [call] = found[-1]["response"]["output"]
    deltas = [event["delta"] for event in found if event["type"].endswith("input.delta")]
    assert "".join(deltas) == call["input"] == found[-3]["input"]
    assert re.fullmatch(DATE["format"]["definition"], call["input"])
    assert (call["type"], call["name"]) == ("custom_tool_call", "date")


def test_a_grammar_in_lark_is_enforced(client: openai.OpenAI) -> None:
    definition = """
        start: "*** Begin Patch" LF line{2} "*** End Patch" LF?
        line: "+" /[ a-z"]{1,8}/ LF -> added
        %import common.LF
    """
    grammar = {"type": "grammar", "syntax": "lark", "definition": definition}
    tool: Any = {"type": "custom", "name": "apply_patch", "format": grammar}
    choice: Any = {"type": "custom", "name": "apply_patch"}
    response = ask(
        client, "Add two lines.", tools=[tool], tool_choice=choice, parallel_tool_calls=False
    )
    [call] = response.output
    assert call.type == "custom_tool_call"
    lines = r'\*\*\* Begin Patch\n(\+[ a-z"]{1,8}\n){2}\*\*\* End Patch\n?'
    assert re.fullmatch(lines, call.input)


def test_a_custom_tools_output_is_answered(client: openai.OpenAI) -> None:
    fields: Any = {"tools": [DATE], "parallel_tool_calls": False}
    first = ask(client, "Open 2024.", tool_choice={"type": "custom", "name": "date"}, **fields)
    [call] = first.output
    assert call.type == "custom_tool_call"
    output: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Open."}
    second = ask(client, [output], previous_response_id=first.id, max_output_tokens=3, **fields)
    whole: Any = [{"role": "user", "content": "Open 2024."}, call.model_dump(), output]
    again = ask(client, whole, max_output_tokens=3, **fields)
    assert second.output_text == again.output_text
    assert second.usage is not None
    assert again.usage is not None
    assert second.usage.input_tokens == again.usage.input_tokens
    kept = list(client.responses.input_items.list(second.id))
    assert [item.type for item in kept] == ["custom_tool_call_output"]


def test_a_hosted_tool_is_left_out(http: httpx.Client) -> None:
    body: dict[str, Any] = {"input": "Hi", "max_output_tokens": 1}
    for stream in (False, True):
        answer = http.post("/v1/responses", json={**body, "tools": [HOSTED], "stream": stream})
        assert answer.status_code == 200
        assert re.fullmatch('299 legato ".*: web_search"', answer.headers["warning"])
    alone = http.post("/v1/responses", json=body)
    assert "warning" not in alone.headers
    beside = http.post("/v1/responses", json={**body, "tools": [HOSTED, WEATHER]}).json()
    without = http.post("/v1/responses", json={**body, "tools": [WEATHER]}).json()
    assert beside["tools"][0] == HOSTED
    assert beside["usage"]["input_tokens"] == without["usage"]["input_tokens"]


def test_tools_are_allowed_beside_a_hosted_one(client: openai.OpenAI) -> None:
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [HOSTED, WEATHER]}
    fields: Any = {"tools": [HOSTED, WEATHER], "parallel_tool_calls": False}
    [call] = ask(client, "What is the weather in Paris?", tool_choice=allowed, **fields).output
    assert call.type == "function_call"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [HOSTED], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [HOSTED, WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        (
            {
                "tools": [HOSTED, WEATHER],
                "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [HOSTED]},
            },
            "tool_choice",
        ),
        (
            {"tools": [WEB], "tool_choice": {"type": "function", "name": "get_weather"}},
            "tool_choice",
        ),
        ({"tools": [{"type": "teleport"}]}, "tools.0"),
        ({"tools": [{"type": []}]}, "tools.0"),
        ({"tools": [5]}, "tools.0"),
        ({"tools": [HOSTED, {**WEB, "tools": [WEATHER, HOSTED]}]}, "tools.1.tools.1"),
        ({"tools": [HOSTED, {**WEB, "tools": [WEATHER, WEATHER]}]}, "tools.1.tools.1.name"),
        ({"tools": [{**WEB, "tools": [{**WEATHER, "name": "a b"}]}]}, "tools.0.tools.0.name"),
        ({"tools": [DATE, {**DATE, "name": "a b"}]}, "tools.1.name"),
        (
            {
                "tools": [
                    {**DATE, "format": {"type": "grammar", "syntax": "regex", "definition": "("}}
                ],
                "tool_choice": "required",
            },
            "tools.0.format",
        ),
        (
            {"tools": [{**DATE, "format": {**DATE["format"], "syntax": "lark"}}]},
            "tools.0.format",
        ),
        ({"tools": [{**DATE, "format": {"type": "grammar"}}]}, "tools.0.format"),
        # Beside another tool, the grammar of all calls compiles without it.
        (
            {"tools": [WEATHER, {**DATE, "format": {**DATE["format"], "definition": r"[^\s\S]"}}]},
            "tools.1.format",
        ),
        (
            {
                "tools": [{**WEATHER, "strict": True, "parameters": _UNKNOWN}],
                "text": {
                    "format": {"type": "json_schema", "name": "n", "schema": WEATHER["parameters"]}
                },
            },
            "tools.0.parameters",
        ),
        (
            {
                "tools": [WEATHER],
                "text": {
                    "format": {
                        "type": "json_schema",
                        "name": "n",
                        "schema": _UNKNOWN,
                        "strict": True,
                    }
                },
            },
            "text.format.schema",
        ),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input.0.input"),
    ],
)
def test_what_is_refused(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    response = http.post("/v1/responses", json={"input": "Hi", **fields})
    check(response, 400, type="invalid_request_error", param=param)


@given(st.text(), st.booleans(), st.lists(st.integers(0, 99), max_size=8))
def test_an_input_does_not_depend_on_the_pieces(text: str, is_ascii: bool, cuts: list[int]) -> None:
    written = json.dumps({"input": text}, ensure_ascii=is_ascii)
    ends = sorted({min(cut, len(written)) for cut in cuts} | {len(written)})
    reader = CustomInput()
    pieces = [reader.feed(written[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    assert "".join(pieces) == text


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (r"\ud83d\ude00", "\N{GRINNING FACE}"),
        (r"\ud83d\n", "\ufffd\n"),
        (r"\ud83dx", "\ufffdx"),
        (r"\ud83d\u0041", "\ufffdA"),
        (r"\ude00", "\ufffd"),
    ],
)
def test_surrogates(written: str, text: str) -> None:
    reader = CustomInput()
    assert "".join(map(reader.feed, f'{{"input": "{written}"}}')) == text
