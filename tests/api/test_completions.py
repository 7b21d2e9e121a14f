"""POST /v1/completions, answered whole."""

from typing import Any

import httpx
import openai
import pytest

from tests.api.launch import MODEL

PROMPT = "The capital of France is"


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={"temperature": 0, "max_tokens": 6, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def token_ids(http: httpx.Client, text: str) -> list[int]:
    tokens: list[int] = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return tokens


def test_openai_client(client: openai.OpenAI) -> None:
    completion = client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=6, user="somebody"
    )
    assert completion.object == "text_completion"
    assert completion.choices[0].text.startswith(" Paris")
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (5, 6)
    assert completion.usage.total_tokens == 11


def test_max_tokens_is_16_by_default(http: httpx.Client) -> None:
    answer = complete(http, prompt=PROMPT, max_tokens=None, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 16


def test_all_forms_of_a_prompt(http: httpx.Client) -> None:
    ids = token_ids(http, PROMPT)
    texts = {
        complete(http, prompt=prompt)["choices"][0]["text"]
        for prompt in (PROMPT, [PROMPT], ids, [ids])
    }
    assert len(texts) == 1


def test_batch_times_n_is_ordered_by_prompt(http: httpx.Client) -> None:
    answer = complete(http, prompt=["One, two, three,", PROMPT], n=2, best_of=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts[0] == texts[1]
    assert texts[0].startswith(" four, five, six")
    assert texts[2] == texts[3]
    assert texts[2].startswith(" Paris")
    assert answer["usage"]["completion_tokens"] == 24
    num_prompt_tokens = len(token_ids(http, "One, two, three,")) + 5
    assert answer["usage"]["prompt_tokens"] == num_prompt_tokens


def test_a_seed_makes_the_tokens_reproducible(http: httpx.Client) -> None:
    def sampled(seed: int) -> str:
        answer = complete(http, prompt="Once", temperature=1.0, seed=seed, max_tokens=12)
        text: str = answer["choices"][0]["text"]
        return text

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_n_samples_differ_and_the_first_keeps_the_seed(http: httpx.Client) -> None:
    settings = {"prompt": "Once", "temperature": 1.0, "seed": 7, "max_tokens": 4}
    several = [choice["text"] for choice in complete(http, n=3, **settings)["choices"]]
    assert len(set(several)) == 3
    assert several[0] == complete(http, **settings)["choices"][0]["text"]


@pytest.mark.parametrize("kept", [False, True])
def test_stop_string(http: httpx.Client, kept: bool) -> None:
    answer = complete(
        http,
        prompt="One, two, three,",
        max_tokens=40,
        stop=["never said", "six"],
        include_stop_str_in_output=kept,
    )
    choice = answer["choices"][0]
    assert choice["text"] == (" four, five, six" if kept else " four, five, ")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "six")


def test_stop_token(http: httpx.Client) -> None:
    paris = token_ids(http, " Paris")
    answer = complete(http, prompt=PROMPT, stop_token_ids=paris, stop=".")
    choice = answer["choices"][0]
    assert choice["text"] == ""
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", paris[0])


def test_logit_bias_decides(http: httpx.Client) -> None:
    lyon = token_ids(http, " Lyon")[0]
    answer = complete(http, prompt=PROMPT, logit_bias={str(lyon): 100}, max_tokens=1)
    assert token_ids(http, answer["choices"][0]["text"]) == [lyon]


def test_min_tokens_and_ignore_eos(http: httpx.Client) -> None:
    eos = http.post("/tokenize", json={"prompt": "<|im_end|>"}).json()["tokens"][0]
    always_eos = {"prompt": PROMPT, "logit_bias": {str(eos): 100}, "max_tokens": 8}
    assert complete(http, **always_eos)["choices"][0]["finish_reason"] == "stop"
    assert complete(http, **always_eos, min_tokens=3)["usage"]["completion_tokens"] == 4
    ignored = complete(http, **always_eos, ignore_eos=True)
    assert ignored["usage"]["completion_tokens"] == 8
    assert ignored["choices"][0]["text"] == ""
    shown = complete(http, **always_eos, ignore_eos=True, skip_special_tokens=False)
    assert shown["choices"][0]["text"] == "<|im_end|>" * 8


def test_what_vllm_bench_sends(http: httpx.Client) -> None:
    """The fields of `vllm bench serve`'s client, including null ones."""
    request = {
        "model": MODEL,
        "prompt": PROMPT,
        "repetition_penalty": 1.0,
        "max_tokens": 4,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    with http.stream("POST", "/v1/completions", json=request) as response:
        assert response.status_code == 200
        assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"


def test_request_id_is_returned(http: httpx.Client) -> None:
    response = http.post(
        "/v1/completions",
        json={"prompt": PROMPT, "max_tokens": 1},
        headers={"X-Request-Id": "mine-1"},
    )
    assert response.headers["X-Request-Id"] == "mine-1"
    assert "mine" not in response.json()["id"], "answers have ids of the server's own"
    assert (
        http.get("/health").headers["X-Request-Id"] != http.get("/health").headers["X-Request-Id"]
    )
