"""What clients of vLLM and llama.cpp expect beside the endpoints themselves."""

import gzip
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from legato.core.spelling import did_you_mean
from tests.api.launch import MODEL
from tests.api.test_errors import check

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", CHAT),
        ("/completions", {"prompt": "Hi", "max_tokens": 1}),
        ("/messages", CHAT),
        ("/messages/count_tokens", {"messages": CHAT["messages"]}),
        ("/responses", {"input": "Hi", "max_output_tokens": 1}),
    ],
)
def test_paths_without_a_version(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answers = [http.post(prefix + path, json={**body, "seed": 1} if "max" in str(body) else body)
               for prefix in ("", "/v1")]  # fmt: skip
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json().keys() == answers[1].json().keys()


def test_models_without_a_version(http: httpx.Client) -> None:
    assert http.get("/models").json() == http.get("/v1/models").json()
    assert http.get(f"/models/{MODEL}").json()["id"] == MODEL


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/completions", "/health"])
def test_options_names_the_methods(http: httpx.Client, path: str) -> None:
    answer = http.options(path)
    assert answer.status_code == 204
    assert {"GET", "POST"} & set(answer.headers["allow"].split(", "))
    assert http.options("/nowhere").status_code == 404


def test_probes_of_peers(http: httpx.Client) -> None:
    assert http.head("/health").status_code == 200
    assert http.head("/health").content == b""
    for method in ("GET", "POST"):
        assert http.request(method, "/ping").status_code == 200
    assert http.get("/load").json()["server_load"] >= 0


def test_metrics_in_openmetrics(http: httpx.Client) -> None:
    accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
    answer = http.get("/metrics", headers={"Accept": accept})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
    names = {family.name for family in text_string_to_metric_families(answer.text)}
    assert "legato:num_requests_running" in names
    assert http.get("/metrics").headers["content-type"].startswith("text/plain")


def test_a_body_in_gzip(http: httpx.Client) -> None:
    plain = b'{"prompt": "Hi", "return_token_strs": true}'
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    answer = http.post("/tokenize", content=gzip.compress(plain), headers=headers)
    del headers["Content-Encoding"]
    assert answer.json() == http.post("/tokenize", content=plain, headers=headers).json()
    headers["Content-Encoding"] = "gzip"
    for wrong in (plain, gzip.compress(plain)[:-5], gzip.compress(plain) + b"x"):
        check(http.post("/tokenize", content=wrong, headers=headers), 400)
    bomb = gzip.compress(b" " * 2**26)
    check(http.post("/tokenize", content=bomb, headers=headers), 413)
    other = {**headers, "Content-Encoding": "br"}
    assert http.post("/tokenize", content=plain, headers=other).status_code == 415


def test_input_tokens_of_a_response(client: openai.OpenAI, http: httpx.Client) -> None:
    first = client.responses.create(model=MODEL, input="Hi", max_output_tokens=2)
    body = {"input": "And now?", "previous_response_id": first.id}
    counted = http.post("/v1/responses/input_tokens", json=body).json()
    second = http.post("/v1/responses", json={**body, "max_output_tokens": 1}).json()
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": second["usage"]["input_tokens"],
    }
    body["previous_response_id"] = "resp_none"
    check(http.post("/v1/responses/input_tokens", json=body), 400, param="previous_response_id")


def test_fields_are_null_where_they_are_not_asked_for(http: httpx.Client) -> None:
    chat = http.post("/v1/chat/completions", json=CHAT).json()
    completion = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1}).json()
    for answer in (chat, completion):
        assert answer["system_fingerprint"].startswith("legato-")
        assert answer["kv_transfer_params"] is None
        assert answer["choices"][0]["token_ids"] is None
    assert chat["prompt_token_ids"] is None
    assert completion["choices"][0]["prompt_token_ids"] is None
    assert completion["choices"][0]["prompt_logprobs"] is None


def test_no_usage_where_it_is_switched_off(http: httpx.Client) -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    body = {**CHAT, "stream": True, "stream_options": options}
    assert '"usage"' not in http.post("/v1/chat/completions", json=body).text


def test_a_name_is_suggested_once() -> None:
    assert did_you_mean("/setings", ["/settings", "/settings"]) == "; did you mean /settings?"


def test_all_wrong_keys_of_a_bias_are_named(http: httpx.Client) -> None:
    body = {**CHAT, "logit_bias": {"bad1": 1, "5": 1, "bad2": 1}}
    told = check(http.post("/v1/chat/completions", json=body), 400, param="logit_bias")
    assert told.endswith("not 'bad1' or 'bad2'")
