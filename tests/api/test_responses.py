"""/v1/responses with OpenAI's client, streamed and whole, and what it can come back to."""

import json
from typing import Annotated, Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter

from tests.api.launch import MODEL, ServerProcess
from tests.api.test_errors import check
from tests.api.wire import named_events

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Place(BaseModel):
    city: Annotated[str, Field(min_length=1, max_length=20)]


validate_event: Any = TypeAdapter(ResponseStreamEvent).validate_python


def ask(client: openai.OpenAI, asked: Any = QUESTION, **fields: Any) -> Response:
    response = client.responses.create(model=MODEL, input=asked, temperature=0, **fields)
    # The client takes anything; its own types do not.
    return Response.model_validate(json.loads(response.model_dump_json(exclude_unset=True)))


def events(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """All events of a stream; OpenAI's types describe each."""
    body = {"input": QUESTION, "temperature": 0, "stream": True, **fields}
    answer = http.post("/v1/responses", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = named_events(answer.text)
    for event in found:
        validate_event(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_answers_whole(client: openai.OpenAI) -> None:
    response = ask(client, metadata={"a": "b"}, instructions="Be brief.", max_output_tokens=50)
    assert response.output_text
    assert response.status == "completed"
    assert response.instructions == "Be brief."
    assert response.metadata == {"a": "b"}
    assert response.temperature == 0
    assert response.max_output_tokens == 50
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_a_text_is_a_users_message(client: openai.OpenAI, http: httpx.Client) -> None:
    response = ask(
        client, [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    )
    messages = [{"role": "user", "content": QUESTION}]
    tokenized = http.post("/tokenize", json={"messages": messages}).json()
    assert response.usage is not None
    assert response.usage.input_tokens == tokenized["count"]
    assert response.output_text == ask(client).output_text == ANSWER


def test_a_cut_answer_is_incomplete(client: openai.OpenAI) -> None:
    response = ask(client, max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert response.completed_at is None


def test_streams_what_it_answers_whole(client: openai.OpenAI, http: httpx.Client) -> None:
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(deltas) == ANSWER
    types = [event["type"].removeprefix("response.") for event in events(http)]
    num_deltas = types.count("output_text.delta")
    assert num_deltas > 5
    assert types == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * num_deltas,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]


def test_the_end_of_a_stream_is_what_is_stored(http: httpx.Client) -> None:
    *_, last = events(http, max_output_tokens=4)
    assert last["type"] == "response.incomplete"
    stored = http.get(f"/v1/responses/{last['response']['id']}").json()
    assert stored == last["response"]


def test_logprobs(client: openai.OpenAI, http: httpx.Client) -> None:
    include: Any = ["message.output_text.logprobs"]
    response = ask(client, include=include, top_logprobs=2, max_output_tokens=4)
    part: Any = response.output[0].content[0]  # type: ignore[union-attr,index]
    assert [len(token.top_logprobs) for token in part.logprobs] == [2] * 4
    assert "".join(token.token for token in part.logprobs) == part.text
    streamed = [
        token
        for event in events(http, include=include, top_logprobs=2, max_output_tokens=4)
        if event["type"] == "response.output_text.delta"
        for token in event["logprobs"]
    ]
    assert [token["token"] for token in streamed] == [token.token for token in part.logprobs]


def test_a_chain_is_the_conversation(client: openai.OpenAI) -> None:
    first = ask(client)
    second = ask(client, "And of Italy?", previous_response_id=first.id)
    third = ask(client, "And of Spain?", previous_response_id=second.id)
    whole: Any = [
        {"role": "user", "content": QUESTION},
        *[item.model_dump() for item in first.output],
        {"role": "user", "content": "And of Italy?"},
        *[item.model_dump() for item in second.output],
        {"role": "user", "content": "And of Spain?"},
    ]
    again = ask(client, whole, store=False)
    assert third.output_text == again.output_text
    assert third.usage is not None
    assert again.usage is not None
    assert third.usage.input_tokens == again.usage.input_tokens
    assert third.previous_response_id == second.id
    assert len(client.responses.input_items.list(third.id).data) == 1


def test_items_are_referred_to(client: openai.OpenAI) -> None:
    first = ask(client)
    [asked] = client.responses.input_items.list(first.id).data
    references: Any = [
        {"type": "item_reference", "id": asked.id},
        {"id": first.output[0].id},
        {"role": "user", "content": "And of Italy?"},
    ]
    with pytest.raises(openai.BadRequestError, match="twice"):
        ask(client, references[:1] * 2)
    second = ask(client, references)
    chained = ask(client, "And of Italy?", previous_response_id=first.id)
    assert second.output_text == chained.output_text
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in items] == ["message"] * 3
    shown: Any = items
    assert [part.text for item in shown for part in item.content] == [
        QUESTION,
        ANSWER,
        "And of Italy?",
    ]


def test_input_items_come_in_pages(client: openai.OpenAI) -> None:
    texts = [f"This is number {i}." for i in range(5)]
    response = ask(
        client, [{"role": "user", "content": text} for text in texts], max_output_tokens=1
    )
    pages = client.responses.input_items.list(response.id, limit=2, order="asc")
    found: Any = [item for page in pages.iter_pages() for item in page.data]
    assert [item.content[0].text for item in found] == texts
    assert len({item.id for item in found}) == 5


def test_what_is_deleted_or_not_stored_is_not_there(client: openai.OpenAI) -> None:
    kept, not_kept = ask(client, max_output_tokens=1), ask(client, max_output_tokens=1, store=False)
    assert client.responses.retrieve(kept.id).output_text == kept.output_text
    client.responses.delete(kept.id)
    for response in (kept, not_kept):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.delete(response.id)
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, previous_response_id=response.id)
        assert refused.value.code == "previous_response_not_found"
        assert refused.value.param == "previous_response_id"


def test_nothing_here_is_cancelled(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(ask(client, max_output_tokens=1).id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_none")


def test_a_function_is_called_and_its_output_answered(client: openai.OpenAI) -> None:
    fields: Any = {"tools": [WEATHER], "parallel_tool_calls": False}
    first = ask(client, "What is the weather in Paris?", tool_choice="required", **fields)
    [call] = first.output
    assert call.type == "function_call"
    assert call.name == "get_weather"
    assert json.loads(call.arguments) == {"city": "Paris"}
    assert first.tools[0].to_dict() == WEATHER
    output: Any = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": "It is sunny.",
    }
    second = ask(client, [output], previous_response_id=first.id, max_output_tokens=3, **fields)
    whole: Any = [
        {"role": "user", "content": "What is the weather in Paris?"},
        call.model_dump(),
        {**output, "output": [{"type": "input_text", "text": "It is sunny."}]},
    ]
    again = ask(client, whole, max_output_tokens=3, **fields)
    assert second.output_text == again.output_text
    assert second.usage is not None
    assert again.usage is not None
    assert second.usage.input_tokens == again.usage.input_tokens


def test_a_call_is_streamed(http: httpx.Client) -> None:
    found = events(
        http,
        input="What is the weather in Paris?",
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "get_weather"},
    )
    types = [event["type"].removeprefix("response.") for event in found]
    num_deltas = types.count("function_call_arguments.delta")
    assert num_deltas > 3
    assert types == [
        *("created", "in_progress", "output_item.added"),
        *["function_call_arguments.delta"] * num_deltas,
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    [call] = found[-1]["response"]["output"]
    deltas = [event["delta"] for event in found if event["type"].endswith("arguments.delta")]
    assert "".join(deltas) == call["arguments"] == found[-3]["arguments"]


def test_text_has_the_form_of_a_model(client: openai.OpenAI) -> None:
    response = client.responses.parse(
        model=MODEL,
        input="Where is the Eiffel Tower?",
        text_format=Place,
        temperature=0,
        max_output_tokens=60,
    )
    assert response.output_parsed is not None
    assert response.output_parsed.city
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "x"}}})
    assert str(refused.value.param).startswith("text.format.schema")


def test_a_client_that_goes_away_frees_its_request(server: ServerProcess) -> None:
    body = {"input": "Tell me a long story.", "ignore_eos": True, "stream": True}
    with server.http.stream(
        "POST", "/v1/responses", json=body, headers={"X-Request-Id": "left"}
    ) as response:
        created = next(line for line in response.iter_lines() if line.startswith("data: "))
        response_id = json.loads(created.removeprefix("data: "))["response"]["id"]
        server.wait_for_metric("num_requests_running", 1)
    server.wait_for_metric("num_requests_running", 0)
    for unknown in (response_id, "resp_left"):
        assert server.http.get(f"/v1/responses/{unknown}").status_code == 404


def test_what_other_clients_send_is_accepted(client: openai.OpenAI) -> None:
    response = ask(
        client,
        max_output_tokens=1,
        background=False,
        include=["reasoning.encrypted_content"],
        parallel_tool_calls=False,
        prompt_cache_key="key",
        reasoning={"effort": None, "summary": "auto"},
        safety_identifier="somebody",
        service_tier="auto",
        text={"format": {"type": "text"}, "verbosity": "medium"},
        tool_choice="auto",
        tools=[],
        top_p=0.9,
        truncation="disabled",
        user="somebody",
        extra_body={"top_k": 5, "slo_class": "batch", "seed": 7},
    )
    assert response.usage is not None
    assert response.usage.output_tokens == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"include": ["everything"]}, "include.0"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools.1.name"),
        ({"tools": [{**WEATHER, "parameters": {"type": "x"}}]}, "tools.0.parameters.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input.0"),
        ({"input": [{"role": "robot", "content": "Hi"}]}, "input.0.role"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input.0"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id"),
        ({"input": "very " * 9000}, "input"),
        ({"input": [{"role": "user", "content": "very " * 9000}]}, "input"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"previous_response_id": ""}, "previous_response_id"),
        ({"input": [{"id": "msg_none_0"}]}, "input"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"slo_class": "none"}, "slo_class"),
    ],
)
def test_what_is_refused(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    response = http.post("/v1/responses", json={"input": "Hi", **fields})
    check(response, 400, type="invalid_request_error", param=param)


def test_another_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.responses.create(model="gpt-6", input="Hi")
    assert raised.value.code == "model_not_found"
