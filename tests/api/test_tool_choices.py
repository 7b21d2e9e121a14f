"""Choices of tools that cannot be kept, in each API: 400 that names the field, never silence."""

from typing import Any

import httpx
import pytest

HI = [{"role": "user", "content": "Hi"}]
FUNCTION = {"type": "function", "function": {"name": "f"}}
NAMED = {"type": "function", "name": "f"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
SEARCH = {"type": "tool_search_tool_regex", "name": "tool_search_tool_regex"}


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def one_of(mode: str, tools: Any) -> dict[str, Any]:
    """Allowed tools, as the Responses API words them."""
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


def refused(http: httpx.Client, path: str, body: dict[str, Any]) -> str:
    """Send a body that is refused; return the error's message, which names a field first."""
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    message: str = error["message"]
    if "param" in error:  # Anthropic's errors have none
        assert error["param"] in message
    return message


@pytest.mark.parametrize("tools", [{}, {"tools": []}])
@pytest.mark.parametrize(
    "choice",
    ["required", FUNCTION, allowed("auto", FUNCTION), allowed("required", FUNCTION)],
)
def test_a_chat_without_tools(http: httpx.Client, tools: dict[str, Any], choice: Any) -> None:
    body = {"messages": HI, "tool_choice": choice, **tools}
    told = refused(http, "/v1/chat/completions", body)
    assert told == "tool_choice asks for a call, but there are no tools"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tool_choice": {"type": "function"}}, "tool_choice.function: is missing"),
        (
            {"tool_choice": {"type": "function", "function": {}}},
            "tool_choice.function.name is missing",
        ),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools: is missing"),
        ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools: "),
        ({"tool_choice": allowed("required")}, "tool_choice.allowed_tools.tools: "),
        ({"tool_choice": {**FUNCTION, "type": "auto"}}, "tool_choice.function: goes with"),
        (
            {"tool_choice": {**allowed("auto", FUNCTION), **FUNCTION}},
            "tool_choice.allowed_tools: goes with",
        ),
        ({"function_call": "none"}, "function_call "),
        ({"function_call": {"name": "f"}}, "function_call "),
        ({"tools": [], "function_call": {"name": "f"}}, "function_call "),
        ({"tools": [], "function_call": {}, "functions": [{"name": "f"}]}, "function_call."),
    ],
)
def test_a_chats_choice(http: httpx.Client, fields: dict[str, Any], told: str) -> None:
    body = {"messages": HI, "tools": [FUNCTION], **fields}
    assert refused(http, "/v1/chat/completions", body).startswith(told)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tool_choice": "required"}, "tool_choice asks for a call"),
        ({"tool_choice": NAMED}, "tool_choice asks for a call"),
        ({"tool_choice": {"type": "custom", "name": "f"}}, "tool_choice asks for a call"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice requires a tool that this server"),
        ({"tool_choice": NAMED, "tools": [{"type": "web_search"}]}, "tool_choice asks for a call"),
        ({"tools": [NAMED], "tool_choice": {"type": "function"}}, "tool_choice.name: "),
        ({"tools": [NAMED], "tool_choice": one_of("required", [])}, "tool_choice.tools: "),
        ({"tools": [NAMED], "tool_choice": one_of("auto", [])}, "tool_choice.tools: "),
        ({"tools": [NAMED], "tool_choice": one_of("auto", None)}, "tool_choice.tools: "),
        (
            {"tools": [NAMED], "tool_choice": one_of("auto", [{"type": "function"}])},
            "tool_choice.tools.0.name: ",
        ),
        ({"tools": [NAMED], "tool_choice": one_of("always", [NAMED])}, "tool_choice.mode: "),
    ],
)
def test_a_responses_choice(http: httpx.Client, fields: dict[str, Any], told: str) -> None:
    assert refused(http, "/v1/responses", {"input": "Hi", **fields}).startswith(told)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice asks for a call"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice asks for a call"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice asks for a call"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name: is missing"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name: goes"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "there is no tool 'g'"),
    ],
)
def test_a_messages_choice(
    http: httpx.Client, path: str, fields: dict[str, Any], told: str
) -> None:
    limit = {"max_tokens": 1} if path == "/v1/messages" else {}
    assert refused(http, path, {"messages": HI, **limit, **fields}).startswith(told)


def test_choices_that_ask_for_nothing(http: httpx.Client) -> None:
    for choice in ("auto", "none"):
        chat = {"messages": HI, "max_tokens": 1, "tool_choice": choice}
        assert http.post("/v1/chat/completions", json=chat).status_code == 200
        response = {"input": "Hi", "max_output_tokens": 1, "tool_choice": choice}
        assert http.post("/v1/responses", json=response).status_code == 200
        message = {"messages": HI, "max_tokens": 1, "tool_choice": {"type": choice}}
        assert http.post("/v1/messages", json=message).status_code == 200


def test_a_tool_allowed_twice_is_shown_once(http: httpx.Client) -> None:
    def num_tokens(*tools: Any) -> int:
        body = {"messages": HI, "max_tokens": 1, "tools": [FUNCTION],
                "tool_choice": allowed("auto", *tools)}  # fmt: skip
        usage = http.post("/v1/chat/completions", json=body).json()["usage"]
        return int(usage["prompt_tokens"])

    assert num_tokens(FUNCTION, FUNCTION) == num_tokens(FUNCTION)
