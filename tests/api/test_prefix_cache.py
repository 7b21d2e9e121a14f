"""What clients see of the prefix cache."""

import time
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.api.launch import MODEL, ServerProcess

STORY = "Once upon a time there was a violin that nobody could play. " * 20


def ask(client: openai.OpenAI, topic: str, **extensions: Any) -> ChatCompletion:
    """A long question; those about different topics differ from their first words on."""
    return client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": f"You know all about {topic}."},
            {"role": "user", "content": STORY},
        ],
        temperature=0,
        max_tokens=8,
        extra_body=extensions,
    )


def num_cached(completion: ChatCompletion) -> int:
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    return completion.usage.prompt_tokens_details.cached_tokens or 0


def test_the_same_prompt_again_is_cached_and_answered_the_same(client: openai.OpenAI) -> None:
    cold, warm = ask(client, "violins"), ask(client, "violins")
    assert cold.usage is not None
    assert num_cached(cold) < 32, "the template's beginning may be there from other tests"
    assert cold.usage.prompt_tokens - 32 <= num_cached(warm) < cold.usage.prompt_tokens
    assert warm.choices[0].message.content == cold.choices[0].message.content


def test_the_completions_of_one_prompt_share_it(server: ServerProcess) -> None:
    names = (
        "prefix_cache_hits_total",
        "prefix_cache_queries_total",
        "iteration_prefill_tokens_sum",
    )
    before = [server.metric(name) for name in names]
    request = {"prompt": f"Pianos. {STORY}", "n": 4, "max_tokens": 2, "stream": False}
    usage = server.http.post("/v1/completions", json=request).json()["usage"]
    growth = [server.metric(name) - then for name, then in zip(names, before, strict=True)]
    num_tokens = usage["prompt_tokens"]
    num_shared = (num_tokens - 1) // 32 * 32
    assert growth == [0, num_tokens, num_tokens + 3 * (num_tokens - num_shared)]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0, "the prompt counts once"


def test_a_stream_tells_what_was_cached(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": MODEL, "prompt": f"Flutes. {STORY}", "max_tokens": 2}
    client.completions.create(**request)
    *_, last = client.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    )
    assert last.usage is not None
    assert last.usage.prompt_tokens_details is not None
    assert (last.usage.prompt_tokens_details.cached_tokens or 0) > 200


def test_salts_keep_caches_apart(client: openai.OpenAI) -> None:
    assert num_cached(ask(client, "cellos", cache_salt="a")) == 0
    assert num_cached(ask(client, "cellos", cache_salt="b")) == 0
    assert num_cached(ask(client, "cellos")) < 32
    assert num_cached(ask(client, "cellos", cache_salt="a")) > 200


@pytest.mark.parametrize("salt", ["", "x" * 257, 5])
def test_a_bad_salt_is_refused(http: httpx.Client, salt: object) -> None:
    response = http.post("/v1/completions", json={"prompt": "Hi", "cache_salt": salt})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "cache_salt"


def test_the_cache_is_reset(server: ServerProcess, client: openai.OpenAI) -> None:
    ask(client, "harps")
    assert num_cached(ask(client, "harps")) > 200
    with client.completions.create(
        model=MODEL, prompt="Hi", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(stream)
        answer = server.http.post("/reset_prefix_cache")
        assert answer.json() == {"success": False}, "a request runs"
    assert num_cached(ask(client, "harps")) == 0, "but the others' blocks are forgotten"
    while server.http.get("/load").json() != {"server_load": 0}:
        time.sleep(0.05)
    answer = server.http.post("/reset_prefix_cache?reset_external=true")
    assert answer.json() == {"success": True}
    assert num_cached(ask(client, "harps")) == 0
    refused = server.http.post("/reset_prefix_cache?reset_running_requests=true")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "reset_running_requests"
