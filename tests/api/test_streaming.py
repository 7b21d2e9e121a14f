"""Answers as server-sent events."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.api.launch import MODEL, ServerProcess

QUESTION: list[Any] = [{"role": "user", "content": "Tell me a story."}]


def events(http: httpx.Client, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end as streams do."""
    request = {"temperature": 0, "stream": True, **fields}
    with http.stream("POST", path, json=request) as response:
        assert response.status_code == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_chat_stream_is_the_answer_in_pieces(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {
        "model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 20
    }  # fmt: skip
    whole = client.chat.completions.create(**settings)
    chunks = list(client.chat.completions.create(**settings, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == (
        whole.choices[0].message.content
    )
    assert [c.choices[0].delta.role for c in chunks] == ["assistant", *[None] * (len(chunks) - 1)]
    assert [c.choices[0].finish_reason for c in chunks][-1] == "length"
    assert chunks[0].choices[0].delta.content, "the role comes with the first token, not before"
    assert {c.id for c in chunks} == {chunks[0].id}


def test_each_token_is_a_chunk(http: httpx.Client) -> None:
    chunks = events(http, "/v1/completions", prompt="Once", max_tokens=12, ignore_eos=True)
    assert len(chunks) == 12
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_at_the_end(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL,
        prompt="Once upon a time",
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (4, 3)


def test_continuous_usage(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(
        http,
        "/v1/chat/completions",
        messages=QUESTION,
        max_tokens=3,
        stream_options=options,
    )
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


def test_batch_stream_keeps_choices_apart(http: httpx.Client) -> None:
    request = {"prompt": ["One, two, three,", "A, B, C,"], "n": 2, "max_tokens": 6}
    chunks = events(http, "/v1/completions", **request)
    texts = ["", "", "", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts[0] == texts[1] == " four, five, six,"
    assert texts[2] == texts[3] == " D, E, F,"


def test_stop_string_never_shows(http: httpx.Client) -> None:
    chunks = events(
        http, "/v1/completions", prompt="One, two, three,", max_tokens=40, stop=", six, sev"
    )
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " four, five"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"][0]["stop_reason"] == ", six, sev"


def test_characters_are_never_torn(http: httpx.Client) -> None:
    chunks = events(http, "/v1/completions", prompt="🎻" * 10, max_tokens=12)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "🎻" in "".join(texts)
    assert "\ufffd" not in "".join(texts)
    assert "" in texts, "a token that only begins a character is a chunk all the same"


def test_what_python_takes_for_line_ends_cuts_no_event(http: httpx.Client) -> None:
    """httpx's `iter_lines`, by which `events` reads, cuts at all that `str.splitlines` does."""
    said = "a\u2028b\u2029c\x85d\x0be"
    chunks = events(http, "/v1/completions", prompt=said, max_tokens=1, echo=True)
    assert chunks[0]["choices"][0]["text"].startswith(said)


def test_echo(http: httpx.Client) -> None:
    chunks = events(http, "/v1/completions", prompt="Once upon", max_tokens=2, echo=True, n=2)
    firsts = {}
    for chunk in chunks:
        choice = chunk["choices"][0]
        firsts.setdefault(choice["index"], choice["text"])
    assert all(text.startswith("Once upon") for text in firsts.values())
    assert len(firsts) == 2
    assert len(chunks) == 4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_errors_before_the_first_token_have_a_status(http: httpx.Client, path: str) -> None:
    prompt = {"prompt": "hi"} if path == "/v1/completions" else {"messages": QUESTION}
    response = http.post(path, json={**prompt, "stream": True, "max_tokens": 10**6})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_streams_run_side_by_side(server: ServerProcess) -> None:
    """Two streams that are read in turn: neither waits for the other to end."""
    request = {"prompt": "Once", "max_tokens": 10, "ignore_eos": True, "stream": True}
    with (
        server.http.stream("POST", "/v1/completions", json=request) as one,
        server.http.stream("POST", "/v1/completions", json=request) as other,
    ):
        lines = [
            line for pair in zip(one.iter_lines(), other.iter_lines(), strict=True) for line in pair
        ]
    assert lines.count("data: [DONE]") == 2
