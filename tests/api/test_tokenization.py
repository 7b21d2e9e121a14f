"""POST /tokenize and /detokenize, and the other small routes."""

import httpx
import pytest

from legato import __version__
from tests.api.launch import MODEL


@pytest.mark.parametrize("text", ["Hello, world", " two  spaces\n\n", "🎻 é 漢字", "<|im_start|>x"])
def test_round_trip(http: httpx.Client, text: str) -> None:
    tokenized = http.post("/tokenize", json={"model": MODEL, "prompt": text}).json()
    assert tokenized["count"] == len(tokenized["tokens"])
    assert tokenized["max_model_len"] == 8192
    detokenized = http.post("/detokenize", json={"model": MODEL, "tokens": tokenized["tokens"]})
    assert detokenized.json() == {"prompt": text, "content": text}


def test_long_text(http: httpx.Client) -> None:
    tokenized = http.post("/tokenize", json={"prompt": "word " * 20_000}).json()
    assert tokenized["count"] > 20_000


def test_messages(http: httpx.Client) -> None:
    request = {"messages": [{"role": "user", "content": "Hi"}]}
    opened = http.post("/tokenize", json=request).json()["tokens"]
    closed = http.post("/tokenize", json={**request, "add_generation_prompt": False}).json()
    text = http.post("/detokenize", json={"tokens": opened}).json()["prompt"]
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert opened[: closed["count"]] == closed["tokens"]


def test_token_strs(http: httpx.Client) -> None:
    request = {"prompt": "Hello world", "return_token_strs": True}
    assert http.post("/tokenize", json=request).json()["token_strs"] == ["Hello", "Ġworld"]


@pytest.mark.parametrize(
    ("path", "request_body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True}),
        ("/detokenize", {"tokens": [10**6]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "x"}),
    ],
)
def test_invalid(http: httpx.Client, path: str, request_body: dict[str, object]) -> None:
    response = http.post(path, json=request_body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_other_routes(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    assert http.get("/version").json() == {"version": __version__}
    [card] = http.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == (MODEL, 8192)
    assert http.get(f"/v1/models/{MODEL}").json() == card
