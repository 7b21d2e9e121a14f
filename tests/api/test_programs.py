"""Requests of programs that need a browser or a desktop, each as that program builds it.

Open WebUI 0.12 (`routers/openai.py` of its package), Zed (`crates/open_ai`), and what Cline,
LibreChat and opencode send for other servers than OpenAI's; the programs that need neither are run
by `python -m benchmarks clients`.
"""

import json
from typing import Any

import httpx
import pytest

from tests.api.launch import MODEL, ServerProcess

_SYSTEM = {"role": "system", "content": "Be brief."}
_QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
}
_WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "A city"}},
    "required": ["city"],
}
_FUNCTION = {"name": "get_weather", "description": "Weather now", "parameters": _WEATHER}
_TOOLS = [{"type": "function", "function": _FUNCTION}]

OPEN_WEBUI: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [_SYSTEM, _QUESTION],
        "stream_options": {"include_usage": True},
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": 3,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "stop": ["END"],
        "logit_bias": {"5": -50},
        "reasoning_effort": "low",
    },
    "tool": {
        "messages": [
            _QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [_CALL], "reasoning_content": "Hm."},
            {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
        ],
        "tools": _TOOLS,
    },
    "settings of Ollama": {  # a user's advanced parameters go to every server as they are
        "messages": [_QUESTION],
        "num_ctx": 8192,
        "num_batch": 512,
        "num_keep": 24,
        "num_gpu": 99,
        "num_thread": 8,
        "num_predict": 8,
        "repeat_penalty": 1.1,
        "repeat_last_n": -1,
        "mirostat": 0,
        "mirostat_eta": 0.1,
        "mirostat_tau": 5.0,
        "tfs_z": 1,
        "use_mmap": True,
        "use_mlock": False,
        "keep_alive": "5m",
        "think": False,
    },
}
OTHERS: dict[str, dict[str, Any]] = {
    "Cline for LiteLLM": {
        "messages": [_SYSTEM, {**_QUESTION, "cache_control": {"type": "ephemeral"}}],
        "temperature": 1,
        "drop_params": True,
        "stream_options": {"include_usage": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "litellm_session_id": "cline-1",
    },
    "Cline for OpenRouter": {
        "messages": [_SYSTEM, _QUESTION],
        "stream_options": {"include_usage": True},
        "include_reasoning": True,
        "reasoning": {"max_tokens": 1024},
        "provider": {"order": ["groq"], "allow_fallbacks": False},
        "transforms": ["middle-out"],
    },
    "LibreChat": {
        "messages": [_QUESTION],
        "include_reasoning": True,
        "reasoning": {"effort": "low", "summary": "auto"},
    },
    "opencode": {
        "messages": [_QUESTION],
        "usage": {"include": True},
        "store": False,
        "thinking": {"type": "enabled", "clear_thinking": False},
    },
    "Continue": {"messages": [_QUESTION], "prediction": {"type": "content", "content": "Sunny."}},
}
ZED: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [
            _SYSTEM,
            {"role": "user", "content": [{"type": "text", "text": "Hi"}] * 2},
        ],
        "stream_options": {"include_usage": True},
        "temperature": 1.0,
        "prompt_cache_key": "a thread",
        "reasoning_effort": "medium",
        "stop": ["END"],
    },
    "tool": {
        "messages": [
            _QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "content": [], "tool_call_id": "call_1"},
            {"role": "assistant", "content": "Again.", "tool_calls": [{**_CALL, "id": "call_2"}]},
            {"role": "tool", "content": "Sunny.", "tool_call_id": "call_2"},
        ],
        "stream_options": {"include_usage": True},
        "tools": _TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
    },
}
_CASES = [
    *(
        pytest.param("max_tokens", body, id=f"Open WebUI, {name}")
        for name, body in OPEN_WEBUI.items()
    ),
    *(pytest.param("max_tokens", body, id=name) for name, body in OTHERS.items()),
    *(pytest.param("max_completion_tokens", body, id=f"Zed, {name}") for name, body in ZED.items()),
]


def chunks(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream that ends as it should."""
    answer = http.post("/v1/chat/completions", json={"model": MODEL, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    *lines, end = [line for line in answer.text.splitlines() if line]
    assert end == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize(("limit", "body"), _CASES)
def test_a_turn_is_streamed(http: httpx.Client, limit: str, body: dict[str, Any]) -> None:
    told = chunks(http, {**body, limit: 8})
    if "stream_options" in body or "usage" in body:
        usage = told.pop()
        assert usage["choices"] == []
        assert set(usage["usage"]) >= {"prompt_tokens", "completion_tokens", "total_tokens"}
    for chunk in told:
        [choice] = chunk["choices"]
        assert choice["index"] == 0
        assert {"delta", "finish_reason"} <= choice.keys()
    assert told[-1]["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")


def test_open_webui_stops_a_long_answer_beside_its_title_and_tags(server: ServerProcess) -> None:
    """A second turn streams; meanwhile the program asks for more; then the user stops it."""
    http = server.http
    turns = [_QUESTION, {"role": "assistant", "content": "Sunny."}, _QUESTION]
    long = {"model": MODEL, "stream": True, "messages": turns, "max_tokens": 4000}
    headers = {"HTTP-Referer": "https://openwebui.com/", "X-Title": "Open WebUI"}
    with http.stream("POST", "/v1/chat/completions", json={**long, "ignore_eos": True}) as stream:
        lines = stream.iter_lines()
        assert "delta" in next(lines)
        for task in ("Make a title.", "Make 1-3 tags as JSON.", "Suggest questions."):
            asked = [{"role": "user", "content": f"### Task:\n{task}"}]
            body = {"model": MODEL, "messages": asked, "stream": False, "max_tokens": 8}
            answer = http.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.json()["choices"][0]["message"]["role"] == "assistant"
        assert "delta" in next(line for line in lines if line), "the stream goes on"
    server.wait_for_metric("num_requests_running", 0)


def test_zed_streams_a_response(http: httpx.Client) -> None:
    body = {
        "model": MODEL,
        "stream": True,
        "store": False,
        "max_output_tokens": 16,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "prompt_cache_key": "a thread",
        "input": [
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "What is the weather in Paris?"}],
            },
            {"type": "function_call", "call_id": "call_1", **_CALL["function"]},
            {"type": "function_call_output", "call_id": "call_1", "output": "Sunny."},
        ],
        "tools": [{"type": "function", **_FUNCTION}],
        "reasoning": {"effort": "medium", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
    }
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert "event: response.completed" in answer.text or "event: response.incomplete" in answer.text
