"""The requests of the Open Responses compliance suite that hold text, against its schemas.

https://www.openresponses.org/compliance. Its program needs bun; the answers are validated with the
types that are generated from its OpenAPI document.
"""

from typing import Any, Union

import httpx
import pytest
from pydantic import TypeAdapter

from tests.api.test_warnings import last_events

REQUIRED = frozenset(
    (
        "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model",
        "previous_response_id", "instructions", "output", "error", "tools", "tool_choice",
        "truncation", "parallel_tool_calls", "text", "top_p", "presence_penalty",
        "frequency_penalty", "top_logprobs", "temperature", "reasoning", "user", "usage",
        "max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata",
        "safety_identifier", "prompt_cache_key",
    )
)  # fmt: skip
"""Of a response, in the schema `ResponseResource`."""
REQUIRED_OF_TOOL = frozenset(("type", "name", "description", "parameters", "strict"))
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "maxLength": 8}},
        "required": ["location"],
        "additionalProperties": False,
    },
}


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


CASES: dict[str, dict[str, Any]] = {
    "basic": {"input": [said("user", "Say hello in exactly 3 words.")]},
    "system prompt": {
        "input": [said("system", "You are a pirate."), said("user", "Say hello.")],
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "text": {"verbosity": "low"},
    },
    "tool": {
        "input": [said("user", "What is the weather in Paris?")],
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": 40,
    },
    "several turns": {
        "input": [
            said("user", "My name is Alice."),
            said("assistant", "Hello Alice!"),
            said("user", "What is my name?"),
        ]
    },
}


def body_of(case: str) -> dict[str, Any]:
    return {"max_output_tokens": 8, "temperature": 0, **CASES[case]}


@pytest.fixture(scope="module")
def published() -> Any:
    return pytest.importorskip("openresponses_types.types", reason="it is not installed")


@pytest.mark.parametrize("case", CASES)
def test_no_required_field_is_missing(http: httpx.Client, case: str) -> None:
    body = body_of(case)
    whole = http.post("/v1/responses", json=body).json()
    assert REQUIRED - whole.keys() == set()
    assert all(tool.keys() >= REQUIRED_OF_TOOL for tool in whole["tools"])
    for name in ("presence_penalty", "frequency_penalty"):
        assert whole[name] == body.get(name, 0)
    assert whole["text"]["verbosity"] == body.get("text", {"verbosity": None})["verbosity"]
    for event in last_events(http, "/v1/responses", body):
        if "response" in event:
            assert REQUIRED - event["response"].keys() == set()


@pytest.mark.parametrize("case", CASES)
def test_answers_and_events_validate(http: httpx.Client, published: Any, case: str) -> None:
    body = body_of(case)
    answer = http.post("/v1/responses", json=body).json()
    published.ResponseResource.model_validate(answer)
    if case == "tool":
        assert [item["type"] for item in answer["output"]] == ["function_call"]
    kinds = [kind for name, kind in vars(published).items() if name.endswith("StreamingEvent")]
    any_event = TypeAdapter(Union[tuple(kinds)])  # noqa: UP007 - the members are known at run time
    events = last_events(http, "/v1/responses", body)
    for event in events:
        any_event.validate_python(event)
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
