"""What routers ask a server before they send it requests."""

from typing import Any

import httpx
import pytest

from tests.api.launch import MODEL

QUESTION = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "look_up"}}


def test_a_router_learns_what_is_served(http: httpx.Client) -> None:
    info = http.get("/server_info").json()
    assert http.get("/get_server_info").json() == info
    assert info["model_id"] == info["served_model_name"] == info["model_path"] == MODEL
    assert info["kv_block_size"] == 32
    assert len(info["instance_id"]) == 32
    model = http.get("/model_info").json()
    assert http.get("/get_model_info").json() == model
    assert model["model_path"] == MODEL
    assert http.get("/kv_event_sources").json() == {}, "nobody is told"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": QUESTION, "tools": [TOOL]}),
        ("/v1/completions", {"prompt": "Once upon a time"}),
        ("/v1/messages", {"messages": QUESTION, "system": "Be short."}),
        ("/v1/responses", {"input": "Hi", "instructions": "Be short."}),
    ],
)
def test_a_rendered_prompt_is_what_is_computed(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    limit = "max_output_tokens" if "input" in body else "max_tokens"
    body |= {limit: 1}
    rendered = http.post(f"{path}/render", json=body).json()
    [prompt] = rendered if isinstance(rendered, list) else [rendered]
    assert prompt["model"] == MODEL
    usage = http.post(path, json=body).json()["usage"]
    num_tokens = usage.get("prompt_tokens") or usage.get("input_tokens")
    assert len(prompt["token_ids"]) == num_tokens + usage.get("cache_read_input_tokens", 0)
    if path == "/v1/chat/completions":
        computed = http.post(path, json={**body, "return_token_ids": True}).json()
        assert computed["prompt_token_ids"] == prompt["token_ids"]
    if path == "/v1/completions":
        tokens = http.post("/tokenize", json={"prompt": body["prompt"]}).json()["tokens"]
        assert prompt["token_ids"] == tokens


def test_each_prompt_is_rendered(http: httpx.Client) -> None:
    rendered = http.post("/v1/completions/render", json={"prompt": [[1, 2, 3], [4]]}).json()
    assert [prompt["token_ids"] for prompt in rendered] == [[1, 2, 3], [4]]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions/render", {"messages": QUESTION, "return_hidden_states": True}, 400),
        ("/v1/chat/completions/render", {"messages": QUESTION, "model": "other"}, 404),
        ("/v1/completions/render", {"prompt": []}, 400),
        ("/v1/messages/render", {"messages": QUESTION}, 400),
        ("/v1/responses/render", {"input": "Hi", "previous_response_id": "resp_1"}, 400),
    ],
)
def test_what_is_refused_is_not_rendered(
    http: httpx.Client, path: str, body: dict[str, Any], status: int
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == status
    assert response.json()["error"]["message"]
