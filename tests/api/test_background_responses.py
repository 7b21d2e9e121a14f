"""Responses in the background: polled, followed, cancelled, and bounded as stored ones are."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tests.api.launch import MODEL, ServerProcess

LONG = {"max_output_tokens": 2000, "extra_body": {"ignore_eos": True}}
STORY = {"input": "Tell me a story.", "max_output_tokens": 24, "temperature": 0}


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client


def started(client: openai.OpenAI, **fields: Any) -> Response:
    return client.responses.create(model=MODEL, background=True, **fields)


def polled(client: openai.OpenAI, response: Response) -> Response:
    while response.status in ("queued", "in_progress"):
        time.sleep(0.05)
        response = client.responses.retrieve(response.id)
    return response


def numbers(events: list[ResponseStreamEvent]) -> list[int]:
    return [event.sequence_number for event in events]


def test_a_response_is_made_without_its_client(client: openai.OpenAI) -> None:
    response = started(client, **STORY)
    assert (response.status, response.background, response.output) == ("queued", True, [])
    done = polled(client, response)
    now = client.responses.create(model=MODEL, **STORY)
    assert (done.id, done.status) == (response.id, now.status)
    assert done.output_text == now.output_text
    assert done.usage.output_tokens == now.usage.output_tokens
    later = client.responses.create(
        model=MODEL, input="Go on.", previous_response_id=done.id, max_output_tokens=1
    )
    assert later.usage.input_tokens > done.usage.total_tokens
    assert client.responses.cancel(done.id) == done, "it has ended"


def test_a_stream_is_resumed(client: openai.OpenAI) -> None:
    seen: list[ResponseStreamEvent] = []
    with started(client, **STORY, stream=True) as stream:
        for event in stream:
            seen.append(event)
            if len(seen) == 5:
                break  # the connection is closed
    assert [event.type for event in seen[:3]] == [
        "response.created", "response.queued", "response.in_progress"
    ]  # fmt: skip
    response_id = seen[0].response.id
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=4))
    assert numbers(seen + rest) == list(range(5 + len(rest)))
    assert rest[-1].type == "response.incomplete"
    told = "".join(event.delta for event in seen + rest if "text.delta" in event.type)
    assert told == rest[-1].response.output_text
    assert rest[-1].response == client.responses.retrieve(response_id)
    assert list(client.responses.retrieve(response_id, stream=True)) == seen + rest
    assert not list(client.responses.retrieve(response_id, stream=True, starting_after=999))


def test_a_response_is_cancelled(server: ServerProcess, client: openai.OpenAI) -> None:
    with started(client, input="Hi", **LONG, stream=True) as stream:
        seen = [next(stream) for _ in range(8)]
        response_id = seen[0].response.id
        now = client.responses.retrieve(response_id)
        assert now.status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="still being made"):
            client.responses.create(model=MODEL, input="Hi", previous_response_id=response_id)
        cancelled = client.responses.cancel(response_id)
        assert not any(event.type == "response.completed" for event in stream)
    assert cancelled.status == "cancelled"
    assert cancelled.output_text
    assert 0 < cancelled.usage.output_tokens < 2000
    assert client.responses.retrieve(response_id) == client.responses.cancel(response_id)
    while server.http.get("/load").json() != {"server_load": 0}:
        time.sleep(0.05)


def test_a_deleted_response_is_cancelled(server: ServerProcess, client: openai.OpenAI) -> None:
    with started(client, input="Hi", **LONG, stream=True) as stream:
        response = next(stream).response
        client.responses.delete(response.id)
        *_, last = stream
    assert last.type == "error"
    assert "no longer stored" in last.message
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    while server.http.get("/load").json() != {"server_load": 0}:
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"store": False}, "background can only be used"),
        ({"max_output_tokens": 100_000}, "maximum context length"),
        ({"slo_class": "none"}, "slo_class"),
    ],
)
def test_a_bad_request_is_refused_at_once(
    http: httpx.Client, body: dict[str, Any], told: str
) -> None:
    answer = http.post("/v1/responses", json={"input": "Hi", "background": True, **body})
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


def test_what_is_not_kept_is_not_shown(http: httpx.Client, client: openai.OpenAI) -> None:
    plain = client.responses.create(model=MODEL, input="Hi", max_output_tokens=1)
    unstreamed = polled(client, started(client, input="Hi", max_output_tokens=1))
    for path, told in (
        (f"{plain.id}?stream=true", "only a response with background"),
        (f"{unstreamed.id}?stream=true", "stream: true is streamed again"),
        (f"{unstreamed.id}?starting_after=1", "goes with stream=true"),
        (f"{unstreamed.id}?stream=true&starting_after=-2", "starting_after"),
    ):
        answer = http.get(f"/v1/responses/{path}")
        assert answer.status_code == 400
        assert told in answer.json()["error"]["message"]
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(plain.id)
