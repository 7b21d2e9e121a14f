"""POST /v1/embeddings over HTTP, with OpenAI's client."""

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from legato.observe.traces.attribution import waits_of
from legato.observe.traces.request_story import read_story
from tests.api.launch import MODEL

TEXT = "The capital of France is"
SIZE = 576


def embed(http: httpx.Client, **fields: Any) -> list[np.ndarray]:
    response = http.post("/v1/embeddings", json=fields)
    assert response.status_code == 200, response.text
    return [np.array(one["embedding"]) for one in response.json()["data"]]


def refusal(http: httpx.Client, status: int = 400, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/embeddings", json=fields)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_openai_client(client: openai.OpenAI) -> None:
    """It asks for base64 unless told otherwise."""
    several = [TEXT, "Another text"]
    packed = client.embeddings.create(model=MODEL, input=several, user="somebody")
    plain = client.embeddings.create(model=MODEL, input=several, encoding_format="float")
    assert packed.object == "list"
    assert [one.index for one in packed.data] == [0, 1]
    for one, other in zip(packed.data, plain.data, strict=True):
        assert len(one.embedding) == SIZE
        np.testing.assert_allclose(one.embedding, other.embedding, atol=1e-5)
        assert np.linalg.norm(one.embedding) == pytest.approx(1, abs=1e-5)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == 7
    short = client.embeddings.create(model=MODEL, input=TEXT, dimensions=8)
    assert len(short.data[0].embedding) == 8
    assert np.linalg.norm(short.data[0].embedding) == pytest.approx(1, abs=1e-5)


def test_base64_is_of_little_endian_floats(http: httpx.Client) -> None:
    (plain,) = embed(http, input=TEXT, dimensions=16)
    answer = http.post(
        "/v1/embeddings", json={"input": TEXT, "dimensions": 16, "encoding_format": "base64"}
    ).json()
    packed = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(packed, plain, atol=1e-5)


def test_all_forms_of_input(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": TEXT}).json()["tokens"]
    forms = [embed(http, input=form) for form in (TEXT, [TEXT], ids, [ids], [TEXT, ids])]
    assert [len(vectors) for vectors in forms] == [1, 1, 1, 1, 2]
    for vectors in forms:
        for vector in vectors:
            np.testing.assert_allclose(vector, forms[0][0], atol=1e-5)


def test_truncation(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": TEXT}).json()["tokens"]
    (first,) = embed(http, input=TEXT, truncate_prompt_tokens=2)
    (last,) = embed(http, input=TEXT, truncate_prompt_tokens=2, truncation_side="left")
    np.testing.assert_allclose(first, embed(http, input=ids[:2])[0], atol=1e-5)
    np.testing.assert_allclose(last, embed(http, input=ids[-2:])[0], atol=1e-5)
    (whole,) = embed(http, input=TEXT, truncate_prompt_tokens=-1)
    np.testing.assert_allclose(whole, embed(http, input=TEXT)[0], atol=1e-5)


def test_unnormalized(http: httpx.Client) -> None:
    (raw,) = embed(http, input=TEXT, normalize=False)
    assert np.linalg.norm(raw) > 2
    np.testing.assert_allclose(raw / np.linalg.norm(raw), embed(http, input=TEXT)[0], atol=1e-5)


def test_a_prefix_is_found_in_the_cache(http: httpx.Client) -> None:
    fields = {"input": list(range(100, 180)), "cache_salt": "embeddings"}
    counts = [
        http.post("/v1/embeddings", json=fields).json()["usage"]["prompt_tokens_details"]
        for _ in range(2)
    ]
    assert counts == [{"cached_tokens": 0}, {"cached_tokens": 64}]


def test_beside_a_stream(client: openai.OpenAI, http: httpx.Client) -> None:
    long = list(range(100, 400))
    (alone,) = embed(http, input=long, cache_salt="alone")
    whole = client.completions.create(model=MODEL, prompt=TEXT, temperature=0, max_tokens=12)
    with ThreadPoolExecutor(2) as threads:
        stream = client.completions.create(
            model=MODEL, prompt=TEXT, temperature=0, max_tokens=12, stream=True
        )
        pieces = [next(iter(stream)).choices[0].text]
        beside = threads.submit(embed, http, input=[long, TEXT], cache_salt="beside")
        pieces += [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == whole.choices[0].text
    np.testing.assert_allclose(beside.result()[0], alone, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "input", "missing"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "no prompt"),
        ({"input": [TEXT, 3]}, "input", "must be a text"),
        ({"input": [1, 10**6]}, "input", "outside"),
        ({"input": "x" * 10**6}, "input", "maximum context length"),
        ({"input": [5] * 9000}, "input", "8192 tokens, but the prompt has 9000"),
        ({"input": TEXT, "dimensions": SIZE + 1}, "dimensions", f"between 1 and {SIZE}"),
        ({"input": TEXT, "dimensions": 0}, "dimensions", "1"),
        ({"input": TEXT, "encoding_format": "int8"}, "encoding_format", "base64"),
        ({"input": TEXT, "truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens", "context"),
        ({"input": TEXT, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"input": TEXT, "temperature": 0.5}, "temperature", "not supported"),
        ({"input": TEXT, "slo_class": "nobody's"}, "slo_class", "is not one of"),
        ({"input": [TEXT] * 1025}, "input", "--max-completions"),
    ],
)
def test_refusals(http: httpx.Client, fields: dict[str, Any], param: str, words: str) -> None:
    error = refusal(http, **fields)
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


def test_another_model(http: httpx.Client) -> None:
    assert refusal(http, 404, model="text-embedding-3-small", input=TEXT)["param"] == "model"


def test_metrics_count_it(http: httpx.Client) -> None:
    def count(name: str) -> float:
        lines = http.get("/metrics").text.splitlines()
        values = [float(line.split()[-1]) for line in lines if line.startswith(name)]
        return sum(values)

    names = (
        "legato:prompt_tokens_total",
        "legato:generation_tokens_total",
        'legato:request_success_total{finished_reason="stop"',
        "legato:time_to_first_token_seconds_count",
        "legato:e2e_request_latency_seconds_count",
    )
    before = [count(name) for name in names]
    embed(http, input=[TEXT, TEXT])
    assert [count(name) - was for name, was in zip(names, before, strict=True)] == [10, 0, 2, 2, 2]


def test_a_trace_explains_it(http: httpx.Client, tmp_path: Path) -> None:
    http.post("/trace/start", json={}).raise_for_status()
    answer = http.post("/v1/embeddings", json={"input": list(range(300, 340))})
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(http.post("/trace/stop").content)
    story = read_story(trace, answer.headers["x-request-id"])
    assert story.answer is not None
    assert story.answer.operation == "embeddings"
    waits = waits_of(story)
    assert (waits.num_prompt_tokens, waits.num_output_tokens, waits.longest) == (40, 0, None)
    assert waits.first is not None
    assert waits.first.parts["own_prefill"] > 0


def test_an_answer_of_many_inputs_is_whole(http: httpx.Client) -> None:
    response = http.post("/v1/embeddings", json={"input": [[i] for i in range(3, 203)]})
    answer = json.loads(response.content)
    assert [one["index"] for one in answer["data"]] == list(range(200))
    (single,) = embed(http, input=[150])
    np.testing.assert_allclose(answer["data"][147]["embedding"], single, atol=1e-5)
