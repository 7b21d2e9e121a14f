"""Fields that Legato lacks, and peers' names for its own fields."""

import json
from typing import Any

import httpx
import jsonschema_rs
import pytest

from legato.api.bodies.chat_messages import TemplateOptions
from legato.api.http.middleware import warning_header
from tests.api.launch import ServerProcess
from tests.api.servers import LENIENT, Servers

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0}
PLAIN = {"prompt": "Hi", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def lenient(servers: Servers) -> ServerProcess:
    return servers.get(*LENIENT)


@pytest.mark.parametrize(
    ("path", "body", "unknown", "told"),
    [
        ("/v1/chat/completions", CHAT, {"frobnicate": 1, "max_token": 9}, "frobnicate, max_token"),
        ("/v1/chat/completions", {**CHAT, "stream": True}, {"frobnicate": 1}, "frobnicate"),
        ("/v1/chat/completions", CHAT, {"response_format": {"type": "text", "x": 1}}, "x"),
        ("/v1/completions", PLAIN, {"frobnicate": {"a": [1]}}, "frobnicate"),
        ("/v1/messages", CHAT, {"frobnicate": 1}, "frobnicate"),
        ("/v1/messages", {**CHAT, "stream": True}, {"container": "c"}, "container"),
        ("/v1/messages", CHAT, {"messages": [{**MESSAGES[0], "id": str(i)} for i in range(9)]},
         "id"),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}, {"frobnicate": 1}, "frobnicate"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 4}, {"frobnicate": 1}, "frobnicate"),
        ("/v1/chat/completions/render", CHAT, {"frobnicate": 1}, "frobnicate"),
        ("/tokenize", {"prompt": "Hi"}, {"frobnicate": 1}, "frobnicate"),
    ],
)  # fmt: skip
def test_unknown_fields_are_ignored_and_named(
    lenient: ServerProcess, path: str, body: dict[str, Any], unknown: dict[str, Any], told: str
) -> None:
    before = lenient.metric("request_warnings_total")
    plain = lenient.http.post(path, json=body)
    assert "Warning" not in plain.headers
    answer = lenient.http.post(path, json={**body, **unknown})
    assert answer.status_code == 200, answer.text
    assert answer.headers["Warning"] == f'299 legato "ignored fields: {told}"'
    assert lenient.metric("request_warnings_total") == before + 1
    if path == "/v1/completions":
        assert answer.json()["choices"] == plain.json()["choices"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1, "frobnicate": 1}, "temperature"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"structured_outputs": {"regex": "a", "frobnicate": 1}}, "structured_outputs.frobnicate"),
    ],
)
def test_known_fields_are_checked_all_the_same(
    lenient: ServerProcess, fields: dict[str, Any], param: str
) -> None:
    answer = lenient.http.post("/v1/chat/completions", json={**CHAT, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_warning_carries_no_line_break() -> None:
    assert warning_header(['a"\r\nSet-Cookie: b', "é\\"]) == (
        '299 legato "a\\"??Set-Cookie: b; ?\\\\"'
    )
    assert len(warning_header(["a" * 10_000])) < 2000


def test_an_answer_may_fill_the_context(lenient: ServerProcess) -> None:
    body = {"messages": MESSAGES, "max_tokens": 32000, "ignore_eos": True}
    answer = lenient.http.post("/v1/messages", json=body).json()
    assert answer["stop_reason"] == "model_context_window_exceeded"
    usage = answer["usage"]
    num_prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert num_prompt_tokens + usage["output_tokens"] == 256
    body = {"messages": [{"role": "user", "content": "very " * 300}], "max_tokens": 32000}
    answer = lenient.http.post("/v1/messages", json=body).json()
    assert "context length" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"regex": "[ab]c"}, ("ac", "bc")),
        ({"ebnf": 'root ::= "ac" | "bc"'}, ("ac", "bc")),
        ({"grammar": 'root ::= [ab] "c"'}, ("ac", "bc")),
    ],
)
def test_peers_names_of_the_form(
    http: httpx.Client, fields: dict[str, Any], text: tuple[str, ...]
) -> None:
    for path, body in ("/v1/chat/completions", CHAT), ("/v1/completions", PLAIN):
        [choice] = http.post(path, json={**body, **fields}).json()["choices"]
        assert (choice["text"] if "text" in choice else choice["message"]["content"]) in text


def test_a_json_object_may_have_a_schema(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_object", "schema": schema}
    body = {**CHAT, "max_tokens": 40, "response_format": form}
    [choice] = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert json.loads(choice["message"]["content"])["a"] in (1, 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "("}, "regex"),
        ({"regex": ""}, "regex"),
        ({"ebnf": "root ::= ("}, "ebnf"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"regex": "a", "guided_regex": "a"}, "regex"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": {"type": "x"}}},
         "response_format.schema"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"stream_interval": 0}, "stream_interval"),
    ],
)  # fmt: skip
def test_an_error_has_the_clients_name(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    answer = http.post("/v1/chat/completions", json={**CHAT, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_tokens_are_named_by_their_ids(http: httpx.Client) -> None:
    ids = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    [chat] = http.post(
        "/v1/chat/completions", json={**CHAT, **ids, "logprobs": True, "top_logprobs": 1}
    ).json()["choices"]
    named = [f"token_id:{token_id}" for token_id in chat["token_ids"]]
    assert [entry["token"] for entry in chat["logprobs"]["content"]] == named
    assert [entry["top_logprobs"][0]["token"] for entry in chat["logprobs"]["content"]] == named
    [plain] = http.post("/v1/completions", json={**PLAIN, **ids, "logprobs": 1}).json()["choices"]
    named = [f"token_id:{token_id}" for token_id in plain["token_ids"]]
    assert plain["logprobs"]["tokens"] == named
    assert [list(top) for top in plain["logprobs"]["top_logprobs"]] == [[name] for name in named]


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"enable_thinking": True}, {"enable_thinking": True}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"thinking_token_budget": 0}, {"enable_thinking": False}),
        ({"thinking_token_budget": 100}, {}),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False, "x": 1}},
         {"enable_thinking": False, "x": 1}),
    ],
)  # fmt: skip
def test_switches_of_thinking(fields: dict[str, Any], variables: dict[str, Any]) -> None:
    assert TemplateOptions.model_validate(fields).template_variables == variables


def test_messages_take_variables_and_notes(http: httpx.Client) -> None:
    body = {**CHAT, "chat_template_kwargs": {"x": 1}, "metadata": {"user_id": "u", "run": 5}}
    assert http.post("/v1/messages", json=body).status_code == 200
    body = {**CHAT, "chat_template_kwargs": {"messages": []}}
    assert http.post("/v1/messages", json=body).status_code == 400


def test_null_is_the_same_as_not_sent_and_described_so(servers: Servers) -> None:
    server = servers.get()
    document = server.http.get("/openapi.json").json()
    described = jsonschema_rs.validator_for(
        {"$ref": "#/components/schemas/CompletionRequest", "components": document["components"]}
    )
    for unknown in (None, 1):
        body = {**PLAIN, "frobnicate": unknown, "stream_options": {"frobnicate": unknown}}
        is_taken = server.http.post("/v1/completions", json=body).status_code == 200
        assert is_taken == described.is_valid(body) == (unknown is None)
