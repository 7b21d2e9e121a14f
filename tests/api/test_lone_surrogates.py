"""Lone surrogates, which are no characters: each way into the server ends in a clear 400."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.launch import ServerProcess
from tests.api.servers import TRUSTING, Servers

HALF = "a\ud800b"
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "description": HALF}}
CALL = {"id": HALF, "type": "function", "function": {"name": "f", "arguments": "{}"}}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": HALF}
BODIES: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/chat/completions", {"messages": HI, **fields}) for fields in (
        {"messages": [{"role": "user", "content": HALF}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]},
        {"messages": [{"role": "user", "content": "Hi", "name": HALF}]},
        {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
        {"tools": [TOOL]},
        {"chat_template_kwargs": {"x": [HALF]}},
        {"chat_template_kwargs": {HALF: 1}},
        {"metadata": {"a": HALF}},
        {"model": HALF},
        {"stop": [HALF]},
        {"user": HALF},
        {"tenant": HALF},
        {"cache_salt": HALF},
        {"response_format": {"type": "json_schema", "json_schema": {"name": HALF, "schema": {}}}},
    )),
    *(("/v1/completions", {"prompt": "Hi", **fields}) for fields in (
        {"prompt": HALF},
        {"prompt": ["a", HALF]},
        {"bad_words": [HALF]},
        {"structured_outputs": {"choice": [HALF]}},
        {"structured_outputs": {"json": json.dumps({"const": HALF})}},
        {"structured_outputs": {"regex": "\\ud800"}},
    )),
    ("/v1/responses", {"input": HALF}),
    ("/v1/responses", {"input": [OUTPUT]}),
    ("/v1/responses", {"input": "Hi", "instructions": HALF}),
    ("/v1/messages", {"messages": [{"role": "user", "content": HALF}], "max_tokens": 1}),
    ("/v1/messages", {"messages": HI, "system": HALF, "max_tokens": 1}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": HALF}]}),
    ("/tokenize", {"prompt": HALF}),
    ("/tokenize", {"messages": [{"role": "user", "content": HALF}]}),
]  # fmt: skip
TEMPLATES = {
    "writes half": "{{ '\\ud800' }}",
    "formats half": "{{ '%c' % 0xdfff }}",
    "writes both halves": "{{ '\\ud83c\\udfbb' }}",
    "refuses with half": "{{ raise_exception('\\ud800') }}",
    "asks for half": "{{ messages['\\ud800'].x }}",
}
TEMPLATED = {
    "/v1/chat/completions": {"max_tokens": 1},
    "/v1/chat/completions/render": {"max_tokens": 1},
    "/tokenize": {},
}


@pytest.fixture(scope="module")
def trusting(servers: Servers) -> Iterator[ServerProcess]:
    process = servers.get(*TRUSTING)
    yield process
    log = process.log.read_text()
    assert "Traceback" not in log, log


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    return server.http.post(path, content=json.dumps(body).encode(), headers=headers)


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_body(trusting: ServerProcess, path: str, body: dict[str, Any]) -> None:
    response = post(trusting, path, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("path", TEMPLATED)
def test_a_template(trusting: ServerProcess, path: str, template: str) -> None:
    body = {"messages": HI, "chat_template": TEMPLATES[template], **TEMPLATED[path]}
    response = post(trusting, path, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "messages"
    assert "chat template" in response.json()["error"]["message"]


def test_arguments_of_a_call_stay_the_text_that_they_are(trusting: ServerProcess) -> None:
    """An escape in a JSON text within JSON is six characters, and so it stays."""
    call = {**CALL, "id": "c", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    body = {"messages": [*HI, {"role": "assistant", "tool_calls": [call]}], "max_tokens": 1}
    assert post(trusting, "/v1/chat/completions", body).status_code == 200
