"""Every refusal has OpenAI's error object and the right status."""

from typing import Any

import httpx
import openai
import pytest

from tests.api.launch import MODEL

MESSAGES = [{"role": "user", "content": "Hi"}]


def check(response: httpx.Response, status: int, **expected: Any) -> str:
    """Assert the status and the error object; returns its message."""
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert {name: error[name] for name in expected} == expected
    message: str = error["message"]
    assert message
    return message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"service_tier": 5}, "service_tier"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": 2**70}, "top_k"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"n": 129}, "n"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": "x" * 5000}, "stop"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"stop_token_ids": [2**70]}, "stop_token_ids"),
        ({"max_tokens": 2**70}, "max_tokens"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": {" 5": 1}}, "logit_bias"),
        ({"logit_bias": {"01": 1, "1": 2}}, "logit_bias"),
        ({"logit_bias": {"00": 1}}, "logit_bias"),
        ({"logit_bias": {"+1": 1}}, "logit_bias"),
        ({"logit_bias": {"\u0661": 1}}, "logit_bias"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"prompt": "x" * 1_000_000}, "prompt"),
        ({"prompt": [-1], "echo": True}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"seed": 2**64}, "seed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, 10**6]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": None}, "prompt"),
    ],
)
def test_invalid_completion(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    response = http.post("/v1/completions", json={"prompt": "Hi", **fields})
    check(response, 400, type="invalid_request_error", param=param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"reasoning_effort": "some"}, "reasoning_effort"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "", "content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "r" * 65, "content": "Hi"}]}, "messages.0.role"),
        ({"keep_alive": []}, "keep_alive"),
        ({"think": ""}, "think"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"logprob_token_ids": [49152], "logprobs": True}, "logprob_token_ids"),
        ({"logprob_token_ids": [5] * 129, "logprobs": True}, "logprob_token_ids"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "Hi", "images": ["x"]}]}, "messages.0.images"),
        ({"messages": [{"role": "assistant", "audio": {"id": "x"}}]}, "messages.0.audio"),
        ({"messages": [*MESSAGES, {"role": "user", "content": [{"type": "image_url"}]}]},
         "messages.1.content.0"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}]},
         "tools.0.function.parameters"),
        ({"functions": [{"name": "f", "parameters": {"anyOf": [{"$ref": "#"}]}}]},
         "functions.0.parameters"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "messages"),
        ({"messages": [{"role": "user", "content": "very " * 9000}]}, "messages"),
    ],
)  # fmt: skip
def test_invalid_chat(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    response = http.post("/v1/chat/completions", json={"messages": MESSAGES, **fields})
    check(response, 400, type="invalid_request_error", param=param)


@pytest.mark.parametrize("fields", [{"max_tokens": 2**70}, {"stop_token_ids": [2**70]}])
def test_numbers_that_no_process_can_tell_another(
    http: httpx.Client, fields: dict[str, Any]
) -> None:
    response = http.post("/v1/completions", json={"prompt": "Hi", **fields})
    check(response, 400, type="invalid_request_error", param=next(iter(fields)))


def test_image_parts_are_named_in_the_message(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    response = http.post("/v1/chat/completions", json={"messages": messages})
    assert "'image_url' is not supported: images are not read" in check(response, 400)


def test_prompt_that_is_too_long(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": [5] * 9000})
    message = check(response, 400, code="context_length_exceeded", param="prompt")
    assert "8192" in message


def test_one_bad_prompt_refuses_the_whole_batch(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": [[5, 6], [10**6]], "max_tokens": 1000})
    check(response, 400, param="prompt")


def test_other_model(client: openai.OpenAI, http: httpx.Client) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.completions.create(model="gpt-4o", prompt="Hi")
    assert raised.value.code == "model_not_found"
    check(http.get("/v1/models/gpt-4o"), 404, param="model", code="model_not_found")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'"x"', b"{'prompt': 1}", b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}',
     b'{"prompt": "Hi", "temperature": NaN}', b"[" * 100_000],
)  # fmt: skip
def test_malformed_bodies(http: httpx.Client, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    response = http.post("/v1/completions", content=content, headers=headers)
    check(response, 400, type="invalid_request_error")


def test_body_that_is_not_said_to_be_json(http: httpx.Client) -> None:
    response = http.post("/v1/completions", data={"prompt": "Hi"})
    assert "application/json" in check(response, 400)


def test_errors_do_not_send_everything_back(http: httpx.Client) -> None:
    long = "x" * 100_000
    for fields in ({"model": long}, {long: 1}, {"service_tier": long}, {"slo_class": long}):
        response = http.post("/v1/completions", json={"prompt": "Hi", **fields})
        assert response.status_code in (400, 404)
        assert len(response.content) < 5000


@pytest.mark.parametrize("given", ["two words", "x" * 129, "t\u00fcr", ""])
def test_strange_request_ids_are_replaced(http: httpx.Client, given: str) -> None:
    response = http.get("/health", headers={"X-Request-Id": given.encode("latin-1")})
    assert len(response.headers["X-Request-Id"]) == 32


def test_unknown_routes_and_methods(http: httpx.Client) -> None:
    check(http.get("/v1/frobnicate"), 404)
    check(http.post("/v1/moderations", json={}), 404)
    check(http.get("/v1/completions"), 405)


def test_client_sees_typed_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=MODEL, messages=[], temperature=0)
    assert raised.value.param == "messages"


def test_the_server_is_unharmed(http: httpx.Client) -> None:
    assert http.post("/v1/completions", json={"prompt": "Hi"}).status_code == 200
