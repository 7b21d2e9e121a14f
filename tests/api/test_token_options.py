"""Options about single tokens, over HTTP: which may come, which of a prompt are kept, their ids."""

from typing import Any

import httpx
import openai
import pytest

from tests.api.launch import MODEL

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
PATHS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 8, "temperature": 0}),
    ("/v1/completions", {"prompt": "One two three", "max_tokens": 8, "temperature": 0}),
]
on_both = pytest.mark.parametrize(("path", "body"), PATHS)


def tokens_of(http: httpx.Client, **asked: Any) -> list[int]:
    tokens: list[int] = http.post("/tokenize", json=asked).json()["tokens"]
    return tokens


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def refused(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["param"]


@on_both
def test_only_allowed_tokens_come(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    allowed = tokens_of(http, prompt=" yes no")
    for settings in ({}, {"temperature": 1.5, "n": 2}, {"top_p": 0.5, "temperature": 1.0}):
        asked = {**body, **settings, "allowed_token_ids": allowed, "return_token_ids": True}
        answer = http.post(path, json=asked)
        for choice in answer.json()["choices"]:
            assert len(choice["token_ids"]) == 8
            assert {*choice["token_ids"]} <= {*allowed}


@on_both
def test_settings_that_leave_no_token(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    [yes] = tokens_of(http, prompt=" yes")
    only_yes = {**body, "allowed_token_ids": [yes]}
    at_once = http.post(path, json={**only_yes, "bad_words": ["yes"]})
    assert refused(at_once) == (400, "allowed_token_ids")
    later = http.post(path, json={**only_yes, "bad_words": ["yes yes yes"]})
    assert later.status_code == 400
    assert later.json()["error"]["code"] == "no_token_left"
    assert "settings forbid every token" in later.json()["error"]["message"]
    assert http.post(path, json=body).status_code == 200


@pytest.mark.parametrize(
    "asked",
    [
        {"allowed_token_ids": []},
        {"allowed_token_ids": [10**6]},
        {"allowed_token_ids": [2**70]},
        {"allowed_token_ids": 5},
        {"allowed_token_ids": [*range(2**14 + 1)]},
        {"bad_words": [""]},
        {"bad_words": "word"},
        {"bad_words": ["x"] * 1025},
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
        {"truncate_prompt_tokens": 10**6},
        {"truncate_prompt_tokens": 2**70},
    ],
    ids=lambda asked: str(asked)[:40],
)
def test_out_of_range(http: httpx.Client, asked: dict[str, Any]) -> None:
    for path, body in PATHS:
        assert refused(http.post(path, json={**body, **asked})) == (400, *asked)


@on_both
def test_bad_words_do_not_come(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    plain = http.post(path, json=body).json()["choices"][0]
    words = text_of(plain).split()
    bad = [words[0], " ".join(words[-2:])]
    asked = {**body, "bad_words": bad, "return_token_ids": True}
    choice = http.post(path, json=asked).json()["choices"][0]
    spelled = [tokens_of(http, prompt=space + word) for word in bad for space in ("", " ")]
    came = choice["token_ids"]
    assert not any(came[i : i + len(w)] == w for w in spelled for i in range(len(came)))
    assert text_of(choice) != text_of(plain)
    never = http.post(path, json={**body, "bad_words": ["xylophone"]}).json()["choices"][0]
    assert text_of(never) == text_of(plain)


def test_the_end_of_a_prompt_is_kept(http: httpx.Client) -> None:
    ids = tokens_of(http, prompt="One two three four five six seven")
    body = {"max_tokens": 4, "temperature": 0, "return_token_ids": True}
    asked = {**body, "prompt": ids, "truncate_prompt_tokens": 3, "echo": True, "logprobs": 0}
    answer = http.post("/v1/completions", json=asked).json()
    [choice] = answer["choices"]
    assert choice["prompt_token_ids"] == ids[-3:]
    assert choice["text"].startswith(" five six seven")
    assert answer["usage"]["prompt_tokens"] == 3
    assert len(choice["logprobs"]["tokens"]) == 3 + 4
    short = http.post("/v1/completions", json={**body, "prompt": ids[-3:]}).json()["choices"][0]
    assert choice["text"] == f" five six seven{short['text']}"


def test_a_prompt_longer_than_the_context_is_cut_to_it(http: httpx.Client) -> None:
    max_model_len = http.get("/v1/models").json()["data"][0]["max_model_len"]
    ids = [*range(1000, 1000 + max_model_len + 5)]
    words = "very " * (len(ids) + 1000)
    for path, field, prompt in (
        ("/v1/completions", "prompt", words),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": words}]),
    ):
        asked = {field: prompt, "max_tokens": 2, "truncate_prompt_tokens": 40}
        answer = http.post(path, json=asked)
        assert answer.json()["usage"]["prompt_tokens"] == 40
        too_long = http.post(path, json={**asked, "truncate_prompt_tokens": None})
        assert refused(too_long) == (400, field)


def test_minus_one_keeps_what_the_context_has_room_for(http: httpx.Client) -> None:
    """Scored alone, since it is the longest prompt that there is."""
    max_model_len = http.get("/v1/models").json()["data"][0]["max_model_len"]
    asked = {
        "prompt": "One two three",
        "max_tokens": max_model_len - 2,
        "truncate_prompt_tokens": -1,
        "stop_token_ids": [*range(64)],
        "allowed_token_ids": [*range(64)],
    }
    answer = http.post("/v1/completions", json=asked).json()
    assert answer["usage"]["prompt_tokens"] == 2


@on_both
def test_token_ids_are_returned_whole_and_in_pieces(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    is_chat = "messages" in body
    prompt = {"messages": QUESTION} if is_chat else {"prompt": body["prompt"]}
    ids = tokens_of(http, **prompt)
    asked = {**body, "n": 2, "return_token_ids": True, "ignore_eos": True}
    whole = http.post(path, json=asked).json()
    of_prompt = [whole] if is_chat else whole["choices"]
    assert [one["prompt_token_ids"] for one in of_prompt] == [ids] * len(of_prompt)
    for choice in whole["choices"]:
        text = http.post("/detokenize", json={"tokens": choice["token_ids"]}).json()["prompt"]
        assert text_of(choice) in text
    plain = http.post(path, json=body).json()
    assert plain.get("prompt_token_ids") is None
    assert plain["choices"][0].get("prompt_token_ids") is None
    assert plain["choices"][0]["token_ids"] is None


def test_token_ids_are_streamed(client: openai.OpenAI) -> None:
    more = {"return_token_ids": True}
    chat: Any = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            max_tokens=6,
            temperature=0,
            stream=True,
            extra_body=more,
        )
    )
    plain: Any = list(
        client.completions.create(
            model=MODEL, prompt="One two", max_tokens=6, temperature=0, stream=True, extra_body=more
        )
    )
    assert [hasattr(chunk, "prompt_token_ids") for chunk in chat] == [True] + [False] * (
        len(chat) - 1
    )
    told = [hasattr(chunk.choices[0], "prompt_token_ids") for chunk in plain]
    assert told == [True] + [False] * (len(plain) - 1)
    assert len(plain[0].choices[0].prompt_token_ids) == 2
    for chunks in (chat, plain):
        assert sum(len(chunk.choices[0].token_ids) for chunk in chunks) == 6
