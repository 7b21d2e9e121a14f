"""POST /inference/v1/generate and the `/render` endpoints: vLLM's way of tokens in, tokens out."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.launch import MODEL, ServerProcess

GENERATE = "/inference/v1/generate"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CHAT = {"messages": QUESTION, "max_tokens": 6, "temperature": 0}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}


@pytest.fixture
def http(server: ServerProcess) -> httpx.Client:
    return server.http


def answered(http: httpx.Client, path: str, **body: Any) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def chunks(http: httpx.Client, **body: Any) -> Iterator[Any]:
    with http.stream("POST", GENERATE, json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def test_a_rendered_chat_is_answered_as_the_chat(http: httpx.Client) -> None:
    chat = answered(http, "/v1/chat/completions", **CHAT, return_token_ids=True, seed=1)
    rendered = answered(http, "/v1/chat/completions/render", **CHAT, return_token_ids=True)
    assert rendered["sampling_params"]["max_tokens"] == 6
    assert rendered["sampling_params"]["temperature"] == 0

    tokens = answered(http, GENERATE, **rendered)
    assert tokens["output_mode"] == "tokens"
    assert tokens["prompt_token_ids"] == chat["prompt_token_ids"] == rendered["token_ids"]
    assert tokens["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]
    assert "text" not in tokens["choices"][0]

    content = chat["choices"][0]["message"]["content"]
    text = answered(http, GENERATE, **{**rendered, "output_mode": "text"})
    assert text["choices"][0]["text"] == content
    message = answered(http, GENERATE, **{**rendered, "output_mode": "derender"})
    assert message["choices"][0]["message"] == chat["choices"][0]["message"]
    assert message["usage"]["completion_tokens"] == 6


def test_a_rendered_call_is_read_as_the_call(http: httpx.Client) -> None:
    body = {**CHAT, "max_tokens": 60, "tools": [TOOL], "tool_choice": "required"}
    body["parallel_tool_calls"] = False
    [chat] = answered(http, "/v1/chat/completions", **body)["choices"]
    rendered = answered(http, "/v1/chat/completions/render", **body)
    assert rendered["parse_context"]["tools"] == [
        {"type": "function", "function": {**TOOL["function"], "strict": False}}
    ]
    [choice] = answered(http, GENERATE, **{**rendered, "output_mode": "derender"})["choices"]
    assert choice["finish_reason"] == chat["finish_reason"] == "tool_calls"
    called = [call["function"] for call in choice["message"]["tool_calls"]]
    assert called == [call["function"] for call in chat["message"]["tool_calls"]]
    # Without its context, the message is all content.
    del rendered["parse_context"]
    [choice] = answered(http, GENERATE, **{**rendered, "output_mode": "derender"})["choices"]
    assert "tool_calls" not in choice["message"]
    assert "look_up" in choice["message"]["content"]


@pytest.mark.parametrize("mode", ["tokens", "text"])
def test_a_stream_has_the_same_tokens(http: httpx.Client, mode: str) -> None:
    body = {
        "token_ids": [504, 3575, 282],
        "sampling_params": {"max_tokens": 5, "temperature": 0, "logprobs": 2},
        "output_mode": mode,
    }
    [whole] = answered(http, GENERATE, **body)["choices"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = list(chunks(http, **body, return_token_ids=True, stream_options=options))
    assert told[0]["prompt_token_ids"] == body["token_ids"]
    assert "prompt_token_ids" not in told[1]
    *told, last = told
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5)
    pieces = [chunk["choices"][0] for chunk in told]
    assert [i for piece in pieces for i in piece["token_ids"]] == whole["token_ids"]
    assert pieces[-1]["finish_reason"] == whole["finish_reason"] == "length"
    entries = [entry for piece in pieces for entry in piece["logprobs"]["content"]]
    assert entries == whole["logprobs"]["content"]
    if mode == "text":
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
        return
    for token_id, entry in zip(whole["token_ids"], entries, strict=True):
        assert entry["token_id"] == token_id
        assert entry["top_logprobs"][0]["token_id"] == token_id  # greedy
        assert [one["rank"] for one in entry["top_logprobs"]] == [1, 2]


def test_the_context_alone_bounds_an_output(http: httpx.Client) -> None:
    params = {"structured_outputs": {"regex": "(a b ){12}"}, "n": 2, "seed": 1}
    answer = answered(http, GENERATE, token_ids=[5], sampling_params=params, output_mode="text")
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        assert choice["text"] == 12 * "a b "
        assert len(choice["token_ids"]) > 16


def test_requests_go_by_their_names(http: httpx.Client) -> None:
    def ids(path: str, body: dict[str, Any], **headers: str) -> list[str]:
        answer = http.post(path, json=body, headers=headers).json()
        return [one["request_id"] for one in (answer if isinstance(answer, list) else [answer])]

    chat, path = {"messages": QUESTION}, "/v1/chat/completions/render"
    assert ids(path, {**chat, "request_id": "mine"}) == ["chatcmpl-mine"]
    header = {"X-Request-Id": "header"}
    assert ids(path, {**chat, "request_id": "mine"}, **header) == ["chatcmpl-header"]
    assert ids(path, chat) != ids(path, chat)
    several = {"prompt": ["a", "b"], "request_id": "mine"}
    assert ids("/v1/completions/render", several) == ["cmpl-mine-0", "cmpl-mine-1"]
    one = {"token_ids": [5], "sampling_params": {"max_tokens": 1}, "request_id": "mine"}
    assert ids(GENERATE, one) == ["generate-tokens-mine"]
    assert ids(GENERATE, one, **header) == ["generate-tokens-header"]


def test_offsets_of_tokens(http: httpx.Client) -> None:
    prompt = "Hello, wörld 漢字. <|im_end|> done"
    body = {"return_token_offsets": True, "prompt": [prompt, [5, 6]]}
    of_text, of_tokens = answered(http, "/v1/completions/render", **body)
    assert of_tokens["token_offsets"] is None
    check_offsets(http, prompt, of_text)
    cut = answered(http, "/v1/completions/render", **body, truncate_prompt_tokens=2)[0]
    assert cut["token_offsets"] == of_text["token_offsets"][-2:]

    messages = [{"role": "user", "content": prompt}]
    body = {"messages": messages, "return_token_offsets": True}
    rendered = answered(http, "/v1/chat/completions/render", **body)
    text = http.post("/detokenize", json={"tokens": rendered["token_ids"]}).json()["prompt"]
    assert f"user\n{prompt}<|im_end|>\n" in text, "what the user says is no special token"
    check_offsets(http, text, rendered)
    plain = answered(http, "/v1/chat/completions/render", messages=messages)
    assert plain["token_offsets"] is None


def check_offsets(http: httpx.Client, text: str, rendered: Any) -> None:
    """Whole characters of each token are those at its place."""
    pairs = list(zip(rendered["token_ids"], rendered["token_offsets"], strict=True))
    assert pairs[-1][1][1] == len(text)
    for token_id, (start, end) in pairs:
        told = http.post("/detokenize", json={"tokens": [token_id]}).json()["prompt"]
        assert told == text[start:end] or "\ufffd" in told


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"token_ids": []}, "token_ids", "at least 1"),
        ({"token_ids": [10**6]}, "token_ids", "outside"),
        ({"token_ids": [5] * 9000}, "token_ids", "context"),
        ({"sampling_params": None}, "sampling_params", "missing"),
        ({"sampling_params": {"top_p": 2}}, "sampling_params.top_p", "less than or equal"),
        ({"sampling_params": {"best": 1}}, "sampling_params.best", "not supported"),
        ({"sampling_params": {"min_tokens": 2**31}}, "sampling_params.min_tokens", "min_tokens"),
        ({"sampling_params": {"min_tokens": 5, "max_tokens": 4}}, "sampling_params.min_tokens", ""),
        ({"sampling_params": {"bad_words": [" "]}}, "sampling_params.bad_words", "empty"),
        (
            {"sampling_params": {"structured_outputs": {"regex": "("}}},
            "sampling_params.structured_outputs.regex",
            "cannot be met",
        ),
        (
            {"sampling_params": {"detokenize": False, "stop": ["a"]}},
            "sampling_params.detokenize",
            "stop",
        ),
        (
            {"sampling_params": {"detokenize": False}, "output_mode": "text"},
            "sampling_params.detokenize",
            "output_mode",
        ),
        ({"output_mode": "derender", "stream": True}, "output_mode", "stream"),
        ({"output_mode": "poem"}, "output_mode", "tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"features": {"mm_hashes": {}}}, "features", "1 entries"),
        ({"model": "other"}, "model", "does not exist"),
    ],
)
def test_what_cannot_be_served(
    http: httpx.Client, body: dict[str, Any], param: str, told: str
) -> None:
    good = {"model": MODEL, "token_ids": [1, 2], "sampling_params": {"max_tokens": 1}}
    response = http.post(GENERATE, json={**good, **body})
    assert response.status_code == (404 if param == "model" else 400), response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert told in error["message"]
