"""Log probabilities in the API's shapes."""

import math
from typing import Any

import httpx
import openai
import pytest

from tests.api.launch import MODEL

PROMPT = "The capital of France is"


def first_choice(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    request = {"temperature": 0, "max_tokens": 3, "prompt": PROMPT, **fields}
    response = http.post("/v1/completions", json=request)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def test_chat(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Say 🎻 please"}],
        "temperature": 0,
        "max_tokens": 5,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = client.chat.completions.create(**settings).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.content is not None
    assert len(whole.logprobs.content) == 5
    for entry in whole.logprobs.content:
        assert entry.bytes is not None
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
        assert len(entry.top_logprobs) == 3
        best = entry.top_logprobs[0]
        assert (best.token, best.logprob) == (entry.token, entry.logprob), "greedy"
        assert entry.logprob <= 0
    streamed = [
        entry
        for chunk in client.chat.completions.create(**settings, stream=True)
        for entry in chunk.choices[0].logprobs.content  # type: ignore[union-attr]
    ]
    assert [entry.token for entry in streamed] == [e.token for e in whole.logprobs.content]


def test_chat_without_alternatives(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=1, logprobs=True
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].top_logprobs == []


def test_completions(http: httpx.Client) -> None:
    choice = first_choice(http, logprobs=2)
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert len(top) == 2
        assert top[token] == value == max(top.values()), "greedy"


def test_logprobs_0_shows_the_sampled_token_only(http: httpx.Client) -> None:
    logprobs = first_choice(http, logprobs=0)["logprobs"]
    assert [list(top) for top in logprobs["top_logprobs"]] == [[t] for t in logprobs["tokens"]]


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_scores_the_prompt(http: httpx.Client, max_tokens: int) -> None:
    choice = first_choice(http, echo=True, logprobs=1, max_tokens=max_tokens)
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(PROMPT)
    assert (choice["text"] == PROMPT) == (max_tokens == 0)
    assert choice["finish_reason"] == "length"
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert {len(values) for values in logprobs.values()} == {5 + max_tokens}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"][:3] == [0, 3, 11]


def test_echo_only_counts_no_output(http: httpx.Client) -> None:
    request = {"prompt": PROMPT, "echo": True, "max_tokens": 0}
    answer = http.post("/v1/completions", json=request).json()
    assert answer["choices"][0]["text"] == PROMPT
    assert answer["usage"]["completion_tokens"] == 0


def test_a_sampled_continuation_scores_the_same_as_a_prompt(http: httpx.Client) -> None:
    """What the model says of its own words, as it writes them and as it reads them."""
    written = first_choice(http, logprobs=0, max_tokens=2)
    read = first_choice(http, prompt=PROMPT + written["text"], echo=True, logprobs=0, max_tokens=0)
    pairs = zip(
        written["logprobs"]["token_logprobs"],
        read["logprobs"]["token_logprobs"][-2:],
        strict=True,
    )
    assert all(math.isclose(one, other, abs_tol=1e-2) for one, other in pairs)


def test_prompt_logprobs(http: httpx.Client) -> None:
    choice = first_choice(http, prompt_logprobs=2, n=2)
    scored = choice["prompt_logprobs"]
    assert len(scored) == 5
    assert scored[0] is None
    for entries in scored[1:]:
        assert len(entries) in (2, 3)
        assert min(entry["rank"] for entry in entries.values()) == 1
    assert any(entry["decoded_token"] == " of" for entry in scored[2].values())


def test_prompt_logprobs_of_chat(http: httpx.Client) -> None:
    request = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    answer = http.post("/v1/chat/completions", json={**request, "prompt_logprobs": 0}).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert http.post("/v1/chat/completions", json=request).json()["prompt_logprobs"] is None


LISTED = [5000, 100, 5000]


@pytest.mark.parametrize("sampled", [42, 100])
def test_listed_tokens(http: httpx.Client, sampled: int) -> None:
    fields = {
        "logprob_token_ids": LISTED,
        "allowed_token_ids": [sampled],
        "return_tokens_as_token_ids": True,
    }
    expected = {f"token_id:{i}" for i in (*LISTED, sampled)}
    body = {**fields, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    chat = http.post("/v1/chat/completions", json={**body, "logprobs": True, "top_logprobs": 5})
    for entry in chat.json()["choices"][0]["logprobs"]["content"]:
        shown = [one["token"] for one in entry["top_logprobs"]]
        assert set(shown) == expected
        assert len(shown) == len(expected)
        scores = [one["logprob"] for one in entry["top_logprobs"]]
        assert scores == sorted(scores, reverse=True)
        assert entry["logprob"] == scores[shown.index(f"token_id:{sampled}")]
    tops = first_choice(http, **fields, logprobs=0)["logprobs"]["top_logprobs"]
    assert [set(top) for top in tops] == [expected] * 3
    # In tokens, the parameter alone asks for log probabilities.
    params = {"logprob_token_ids": LISTED, "max_tokens": 1, "allowed_token_ids": [sampled]}
    answer = http.post(
        "/inference/v1/generate", json={"token_ids": [5], "sampling_params": params}
    ).json()
    [entry] = answer["choices"][0]["logprobs"]["content"]
    assert {one["token_id"] for one in entry["top_logprobs"]} == {*LISTED, sampled}


def test_an_echo_has_as_many_prompt_logprobs_as_asked(http: httpx.Client) -> None:
    body = {"prompt": "Once upon a time", "echo": True, "max_tokens": 1, "logprobs": 5}
    for num_top in (0, 1, 3):
        answer = http.post("/v1/completions", json={**body, "prompt_logprobs": num_top})
        [choice] = answer.json()["choices"]
        _, *scored = choice["prompt_logprobs"]
        assert all(num_top <= len(entry) <= num_top + 1 for entry in scored)
        assert all(len(entry) >= 5 for entry in choice["logprobs"]["top_logprobs"][1:])


def test_tokens_that_a_request_lists_have_no_ranks(http: httpx.Client) -> None:
    sampling: dict[str, Any] = {"max_tokens": 1, "logprobs": 2, "temperature": 0}
    for listed in (None, [300, 301, 302]):
        params = {**sampling, "logprob_token_ids": listed}
        body = {"token_ids": [1, 2, 3], "sampling_params": params}
        answer = http.post("/inference/v1/generate", json=body).json()
        [entry] = answer["choices"][0]["logprobs"]["content"]
        first, *others = entry["top_logprobs"]
        assert (
            (first["token_id"], first["rank"])
            == (entry["token_id"], entry["rank"])
            == (
                entry["token_id"],
                1,
            )
        )
        ranks = [other["rank"] for other in others]
        assert ranks == ([2] if listed is None else [None] * len(ranks))
