"""What a rendered prompt repeats of its request, as vLLM's /inference/v1/generate takes it."""

from typing import Any

import msgspec

from legato.server.requests.chat import ChatRequest
from legato.server.requests.completion import CompletionRequest
from legato.server.requests.outcome import RenderTerms


def render_terms(request: ChatRequest | CompletionRequest) -> RenderTerms:
    """Return the terms of a request that is rendered."""
    options = request.stream_options if request.stream else None
    return RenderTerms(
        request_id=request.request_id,
        stream_options=None if options is None else msgspec.json.encode(options.model_dump()),
        parse_context=parse_context(request) if isinstance(request, ChatRequest) else None,
    )


def parse_context(request: ChatRequest) -> bytes:
    """Return the JSON of a `ParseContext`."""
    use = request.tool_use
    calls = [len(message.tool_calls or ()) for message in request.messages]
    context: dict[str, Any] = {
        "tools": [tool.model_dump(exclude_none=True) for tool in use.shown] or None,
        "tool_choice": _choice(request) if use.shown else "none",
        "parallel_tool_calls": use.is_parallel,
        "include_reasoning": True,
        "chat_template_kwargs": request.template_variables,
        "history_tool_call_cnt": sum(calls),
    }
    return msgspec.json.encode(context)


def _choice(request: ChatRequest) -> Any:
    choice = request.tool_choice or request.function_call
    if choice is None:
        return "auto"
    named = choice.model_dump(exclude_none=True)
    return choice.type if named.keys() == {"type"} else named
