"""A type that is no text, which Python cannot look up, is a bad request and no internal error."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from legato.api.anthropic.message_body import MessagesRequest
from legato.api.openai.chat_body import ChatRequest
from legato.api.responses.response_body import ResponsesRequest


def bodies(kind: Any) -> list[tuple[type[BaseModel], dict[str, Any]]]:
    part = {"type": kind, "text": "a"}
    outputs = [
        {"type": f"{name}_call_output", "call_id": "x", "output": [part]}
        for name in ("function", "custom_tool")
    ]
    messages = {"messages": [{"role": "user", "content": [part]}]}
    tools = {"tools": [{"type": kind, "name": "a"}]}
    said = {"messages": [{"role": "user", "content": "Hi"}]}
    return [
        *((ResponsesRequest, {"input": [output]}) for output in outputs),
        (ResponsesRequest, {"input": [{"role": "user", "content": [part]}]}),
        (ResponsesRequest, {"input": [{"type": kind}]}),
        (ResponsesRequest, {"input": "Hi", **tools}),
        (ResponsesRequest, {"input": "Hi", "tool_choice": {"type": kind}}),
        (ChatRequest, messages),
        (ChatRequest, {**said, **tools}),
        (ChatRequest, {**said, "tool_choice": {"type": kind}}),
        (ChatRequest, {**said, "response_format": {"type": kind}}),
        (MessagesRequest, {**messages, "max_tokens": 1}),
        (MessagesRequest, {**said, **tools, "max_tokens": 1}),
        (MessagesRequest, {**said, "max_tokens": 1, "thinking": {"type": kind}}),
    ]


@pytest.mark.parametrize("kind", [[[None]], {"a": 1}, 5, True])
def test_it_is_refused(kind: Any) -> None:
    for model, body in bodies(kind):
        with pytest.raises(ValidationError):
            model.model_validate(body)
