"""Structured output over HTTP: both APIs' words, and what is refused."""

import json
import re
from collections.abc import Callable
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.api.background import BackgroundStream
from tests.api.launch import MODEL, ServerProcess

MESSAGES: Any = [{"role": "user", "content": "Describe a person as JSON."}]
BOOLEANS = ("true", "false")
HOT = {"temperature": 1.3, "max_tokens": 40}


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(pattern="^[A-Z][a-z]{1,7}$")
    age: int = Field(ge=0, le=150)
    tags: list[Literal["tall", "small", "old"]] = Field(max_length=2)


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"messages": MESSAGES, "max_tokens": 60, **fields}
    return http.post("/v1/chat/completions", json=body)


def content(response: httpx.Response) -> str:
    response.raise_for_status()
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def test_the_openai_client_parses_what_comes(client: openai.OpenAI) -> None:
    for seed in range(2):
        answer = client.chat.completions.parse(
            model=MODEL,
            messages=MESSAGES,
            response_format=Person,
            seed=seed,
            temperature=1.3,
            max_tokens=200,
        )
        [choice] = answer.choices
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Person)


def test_any_object(client: openai.OpenAI, http: httpx.Client) -> None:
    [close] = http.post("/tokenize", json={"prompt": "}"}).json()["tokens"]
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=60,
        logit_bias={str(close): 15},
        stream=True,
    )
    pieces = [choice for chunk in chunks for choice in chunk.choices]
    assert isinstance(json.loads("".join(piece.delta.content or "" for piece in pieces)), dict)
    assert pieces[-1].finish_reason == "stop"


def test_text_is_free(http: httpx.Client) -> None:
    free = content(chat(http, temperature=0, max_tokens=12))
    form = {"type": "text"}
    assert content(chat(http, temperature=0, max_tokens=12, response_format=form)) == free


@pytest.mark.parametrize(
    ("fields", "is_right"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
        ({"structured_outputs": {"regex": "[0-9]{3}-[ab]{1,5}c"}},
         re.compile("[0-9]{3}-[ab]{1,5}c").fullmatch),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]'}}, re.compile("x[0-9]").fullmatch),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, BOOLEANS.__contains__),
        ({"guided_json": '{"type": "boolean"}'}, BOOLEANS.__contains__),
        ({"guided_choice": ["a", "b"]}, lambda text: text in ("a", "b")),
        ({"guided_regex": "[xy]{4}"}, re.compile("[xy]{4}").fullmatch),
        ({"guided_grammar": 'start: "a"~3'}, lambda text: text == "aaa"),
        ({"response_format": {"type": "structural_tag", "format": {
            "type": "tag", "begin": "<a>", "end": "</a>",
            "content": {"type": "regex", "pattern": "[0-9]{2}"}}}},
         re.compile("<a>[0-9]{2}</a>").fullmatch),
    ],
)  # fmt: skip
def test_forms(http: httpx.Client, fields: dict[str, Any], is_right: Callable[[str], Any]) -> None:
    answer = chat(http, n=2, seed=3, **{**HOT, **fields})
    for choice in answer.raise_for_status().json()["choices"]:
        assert is_right(choice["message"]["content"])
        assert choice["finish_reason"] == "stop"
    completion = http.post("/v1/completions", json={"prompt": "It is", **HOT, **fields})
    assert is_right(completion.raise_for_status().json()["choices"][0]["text"])


def test_seeds_logprobs_and_neighbours(server: ServerProcess, http: httpx.Client) -> None:
    form = {"structured_outputs": {"regex": "([a-z]{3} )+"}}
    fields = {"seed": 5, "n": 2, "logprobs": True, "top_logprobs": 2, "max_tokens": 12, **form}
    first = chat(http, **fields).raise_for_status().json()["choices"]
    beside = BackgroundStream(server, max_tokens=60)
    second = chat(http, **fields).raise_for_status().json()["choices"]
    beside.join()
    assert [c["message"] for c in first] == [c["message"] for c in second]
    assert first[0]["message"] != first[1]["message"]
    assert len(first[0]["logprobs"]["content"]) == 12


def test_a_stop_string_ends_it_earlier(http: httpx.Client) -> None:
    form = {"regex": "[a-c]{20}"}
    answer = chat(http, structured_outputs=form, stop=["b"], temperature=1.3, seed=1)
    choice = answer.raise_for_status().json()["choices"][0]
    assert re.fullmatch("[ac]*", choice["message"]["content"])
    whole = content(chat(http, structured_outputs=form, ignore_eos=True, min_tokens=50))
    assert len(whole) == 20


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {
            "name": "n", "strict": True, "schema": {"properties": {"a": {"not": {}}}}}}},
         "response_format.json_schema.schema", 'not supported: ["not"], at #/properties/a'),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}},
         "response_format.json_schema.name", "is missing"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", ".format must be"),
        ({"structured_outputs": {"regex": "a["}}, "structured_outputs.regex", "unclosed"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs", "$.regex"),
        ({"structured_outputs": {"rejex": "a"}}, "structured_outputs.rejex", "not supported"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "list of texts"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "exclude each other"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    http: httpx.Client, fields: dict[str, Any], param: str, told: str
) -> None:
    response = chat(http, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert told in error["message"]


def test_keywords_that_are_not_supported_are_passed_over_unless_strict(http: httpx.Client) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3, "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = content(chat(http, response_format=form, max_tokens=200))
    assert isinstance(json.loads(answer), list)


def test_what_recurses_too_deep_is_refused(http: httpx.Client) -> None:
    """The compiler overflows its stack, and no other request notices."""
    rules = "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(9000))
    grammar = f'start: r0\n{rules}r9000: "a"'
    response = chat(http, structured_outputs={"grammar": grammar})
    assert response.status_code == 400
    assert "nested too deeply" in response.json()["error"]["message"]
    assert content(chat(http, structured_outputs={"choice": ["ok"]})) == "ok"


def test_a_dead_end_is_the_forms_fault_and_not_the_servers(http: httpx.Client) -> None:
    """SmolLM2 has no token with the byte 0xF1, and a regex may hide what it needs."""
    fields: Any = {"structured_outputs": {"regex": "a\U00050000"}}
    answer = chat(http, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "no_token_left")
    assert "dead end" in error["message"]
    *_, told = chat(http, **fields, stream=True).text.split("data: ")[:-1]
    assert json.loads(told)["error"]["code"] == "no_token_left"
    chat(http).raise_for_status()
