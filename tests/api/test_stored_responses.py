"""Stored responses: within bounds, and each its tenant's alone. Anthropic's keys and errors."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import ErrorResponse
from openai.types.responses import Response

from tests.api.background import BackgroundRequest
from tests.api.launch import MODEL, ServerProcess, running_server

FLAGS = (
    *("--api-key", "ops=sk-ops,ops=sk-ops-2,lab=sk-lab,sk-gateway"),
    *("--max-stored-responses", "4", "--max-stored-size", "20K", "--max-body-size", "16K"),
    *("--max-num-seqs", "1", "--max-waiting", "1", "--max-model-len", "2048"),
)
BULK = {str(i): "x" * 500 for i in range(16)}
"""Metadata that make a response large, and no prompt long."""


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("stored"), *FLAGS) as process:
        yield process


_asked: list[tuple[str, str]] = []  # keys and ids of responses


@pytest.fixture(autouse=True)
def nothing_is_left(keyed: ServerProcess) -> Iterator[None]:
    yield
    while _asked:
        key, response_id = _asked.pop()
        headers = {"Authorization": f"Bearer {key}"}
        keyed.http.delete(f"/v1/responses/{response_id}", headers=headers)


def ask(keyed: ServerProcess, key: str = "sk-ops", text: str = "Hi", **fields: Any) -> Response:
    client = keyed.openai(api_key=key)
    made = client.responses.create(model=MODEL, input=text, max_output_tokens=1, **fields)
    _asked.append((key, made.id))
    return made


def is_there(keyed: ServerProcess, response: Response, key: str = "sk-ops") -> bool:
    headers = {"Authorization": f"Bearer {key}"}
    status = keyed.http.get(f"/v1/responses/{response.id}", headers=headers).status_code
    assert status in (200, 404)
    return status == 200


def test_a_response_is_its_tenants(keyed: ServerProcess) -> None:
    response = ask(keyed)
    assert is_there(keyed, response, "sk-ops-2")
    for other in ("sk-lab", "sk-gateway"):
        assert not is_there(keyed, response, other)
        client = keyed.openai(api_key=other)
        with pytest.raises(openai.NotFoundError):
            client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.input_items.list(response.id)
        for fields in (
            {"previous_response_id": response.id},
            {"extra_body": {"input": [{"id": response.output[0].id}]}},
        ):
            with pytest.raises(openai.BadRequestError, match="not stored"):
                ask(keyed, other, **fields)
    assert is_there(keyed, response)


@pytest.mark.parametrize("other_key", ["sk-ops", "sk-lab"])
def test_a_request_id_that_two_clients_use_is_two_responses(
    keyed: ServerProcess, other_key: str
) -> None:
    headers = {"X-Request-Id": "same"}
    responses = {
        (key, text): ask(keyed, key, text, extra_headers=headers)
        for key, text in (("sk-ops", "mine"), (other_key, "other's"))
    }
    for (key, text), response in responses.items():
        assert "same" not in response.id
        [item] = keyed.openai(api_key=key).responses.input_items.list(response.id).data
        shown: Any = item
        assert shown.content[0].text == text


@pytest.mark.parametrize("fields", [{}, {"metadata": BULK}])
def test_a_flood_of_one_tenant_leaves_anothers_turns(
    keyed: ServerProcess, fields: dict[str, Any]
) -> None:
    first = ask(keyed, "sk-lab")
    second = ask(keyed, "sk-lab", previous_response_id=first.id)
    flood = [ask(keyed, "sk-ops", **fields) for _ in range(8)]
    assert is_there(keyed, first, "sk-lab")
    assert is_there(keyed, second, "sk-lab")
    ask(keyed, "sk-lab", previous_response_id=second.id)
    assert is_there(keyed, flood[-1]), "the latest of the flood's own"
    assert not is_there(keyed, flood[0])


def test_the_oldest_goes_but_what_is_gone_on_from_is_not_old(keyed: ServerProcess) -> None:
    first, second = ask(keyed), ask(keyed)
    third = ask(keyed, previous_response_id=first.id)
    ask(keyed)
    assert is_there(keyed, second)
    ask(keyed)
    assert [is_there(keyed, one) for one in (first, second, third)] == [True, False, True]
    fourth = ask(keyed, previous_response_id=third.id)
    assert [is_there(keyed, one) for one in (first, third, fourth)] == [True, True, True]


def test_all_together_have_a_size(keyed: ServerProcess) -> None:
    first = ask(keyed)
    for _ in range(2):
        ask(keyed, metadata=BULK)
        assert is_there(keyed, first)
    ask(keyed, metadata=BULK)
    assert not is_there(keyed, first)


def test_a_broken_chain_says_where(keyed: ServerProcess) -> None:
    first = ask(keyed)
    second = ask(keyed, previous_response_id=first.id)
    keyed.openai(api_key="sk-ops").responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match=first.id) as refused:
        ask(keyed, previous_response_id=second.id)
    assert refused.value.code == "previous_response_not_found"


def test_a_conversation_is_no_larger_than_a_body(keyed: ServerProcess) -> None:
    first = ask(keyed, metadata=BULK)
    second = ask(keyed, metadata=BULK, previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError, match="bytes") as refused:
        ask(keyed, previous_response_id=second.id)
    assert refused.value.code == "request_too_large"


def test_what_is_too_long_goes_without_its_first_turns(keyed: ServerProcess) -> None:
    client = keyed.openai(api_key="sk-lab")
    turns: list[Any] = [{"role": "system", "content": "Be brief."}]
    turns += [{"role": "user", "content": f"Number {i}: {'very ' * 420}"} for i in range(6)]

    def asked(items: list[Any], **fields: Any) -> Response:
        return client.responses.create(model=MODEL, input=items, max_output_tokens=1, **fields)

    with pytest.raises(openai.BadRequestError) as refused:
        asked(turns)
    assert refused.value.param == "input"
    assert refused.value.code == "context_length_exceeded"
    kept, cut = asked([turns[0], *turns[-4:]]), asked(turns, truncation="auto")
    assert kept.usage is not None
    assert cut.usage is not None
    assert 1600 < cut.usage.input_tokens == kept.usage.input_tokens
    assert cut.truncation == "auto"


def test_anthropics_clients_send_their_key_otherwise(keyed: ServerProcess) -> None:
    def asked(**options: Any) -> str | None:
        with anthropic.Anthropic(base_url=keyed.url, max_retries=0, **options) as client:
            message = client.messages.create(
                model=MODEL, max_tokens=1, messages=[{"role": "user", "content": "Hi"}]
            )
        return message.stop_reason

    before = keyed.metric("tenant_time_to_first_token_seconds_count", tenant="lab")
    assert asked(api_key="sk-lab") == "max_tokens"
    assert asked(auth_token="sk-lab") == "max_tokens"
    after = keyed.metric("tenant_time_to_first_token_seconds_count", tenant="lab")
    assert after == before + 2
    for key in ("sk-none", "lab=sk-lab"):
        with pytest.raises(anthropic.AuthenticationError) as refused:
            asked(api_key=key)
        assert refused.value.type == "authentication_error"
    without = keyed.http.post("/v1/messages", json={}, headers={"x-api-key": ""})
    assert without.status_code == 401
    assert without.json()["type"] == "error"


def test_responses_in_the_background_count_as_stored(keyed: ServerProcess) -> None:
    client = keyed.openai(api_key="sk-lab")

    def started() -> str:
        made = client.responses.create(
            model=MODEL,
            input="Hi",
            background=True,
            max_output_tokens=1500,
            extra_body={"ignore_eos": True},
        )
        _asked.append(("sk-lab", made.id))
        return made.id

    kept = ask(keyed)
    ids = [started() for _ in range(5)]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(ids[0])
    assert is_there(keyed, kept), "another tenant's stays"
    told = [client.responses.retrieve(one) for one in ids[2:]]
    assert {one.status for one in told} <= {"queued", "in_progress", "failed"}
    for one in told:
        if one.status == "failed":
            assert "wait" in one.error.message
        else:
            assert client.responses.cancel(one.id).status in ("cancelled", "failed")


def test_what_grows_too_large_is_cancelled(keyed: ServerProcess) -> None:
    client = keyed.openai(api_key="sk-lab")
    body = {"ignore_eos": True, "include": ["message.output_text.logprobs"], "top_logprobs": 20}
    made = client.responses.create(
        model=MODEL, input="Hi", background=True, max_output_tokens=300, extra_body=body
    )
    headers = {"Authorization": "Bearer sk-lab"}
    answer = keyed.http.get(f"/v1/responses/{made.id}", headers=headers)
    while answer.status_code == 200:
        assert answer.json()["status"] in ("queued", "in_progress")
        answer = keyed.http.get(f"/v1/responses/{made.id}", headers=headers)
    assert answer.status_code == 404


def test_overload_and_death_are_told_to_each_in_its_words(keyed: ServerProcess) -> None:
    """One request runs and one waits; a third is refused. Then the engine dies over the first."""
    keyed.http.headers["Authorization"] = "Bearer sk-ops"
    body = {"max_tokens": 2000, "ignore_eos": True, "stream": True}
    messages = {"messages": [{"role": "user", "content": "Hi"}], **body}
    with keyed.http.stream("POST", "/v1/messages", json=messages) as running:
        lines = running.iter_lines()
        next(lines)
        waiting = BackgroundRequest(keyed, prompt="Hi", max_tokens=1)
        keyed.wait_for_metric("num_requests_waiting", 1)
        refused = keyed.http.post("/v1/messages", json=messages)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        keyed.engine.kill()
        *_, name, data, _ = lines
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    ErrorResponse.model_validate(error)
    assert error["error"]["type"] == "overloaded_error"
    assert waiting.join().status_code == 200

    asked = {"input": "Hi", "ignore_eos": True, "stream": True}
    with keyed.http.stream("POST", "/v1/responses", json=asked) as running:
        lines = running.iter_lines()
        next(lines)
        keyed.engine.kill()
        *_, name, data, _ = lines
    assert name == "event: response.failed"
    failed = json.loads(data.removeprefix("data: "))["response"]
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == "server_error"
    assert failed["output"][0]["status"] == "incomplete"
    stored = keyed.http.get(f"/v1/responses/{failed['id']}")
    assert stored.status_code == 404
