"""/v1/messages with Anthropic's client, streamed and whole."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.api.launch import MODEL, ServerProcess
from tests.api.wire import named_events

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
GREEDY = {"temperature": 0}

_UNKNOWN: Any = {"type": "object", "properties": {"a": {"type": "string", "format": "no-such"}}}
WEATHER: Any = {
    "name": "get_weather",
    "description": "Tells the weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}

validate_event: Any = TypeAdapter(RawMessageStreamEvent).validate_python


@pytest.fixture
def claude(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def ask(claude: anthropic.Anthropic, messages: list[Any] = QUESTION, **fields: Any) -> Message:
    fields = {"max_tokens": 50, "extra_body": GREEDY, **fields}
    message = claude.messages.create(model=MODEL, messages=messages, **fields)
    # The client takes anything; its own types do not.
    return Message.model_validate(json.loads(message.model_dump_json(exclude_unset=True)))


def events(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """All events of a stream; Anthropic's types describe each."""
    body = {"messages": QUESTION, "max_tokens": 50, **GREEDY, "stream": True, **fields}
    found = named_events(http.post("/v1/messages", json=body).text)
    for event in found:
        if event["type"] != "ping":
            validate_event(event)
    return found


def check(response: httpx.Response, status: int, kind: str) -> str:
    """Assert the status and Anthropic's error object; returns its message."""
    assert response.status_code == status, response.text
    body = response.json()
    if kind != "request_too_large":  # which Anthropic's documentation has, and not its types
        ErrorResponse.model_validate(body)
    assert set(body) == {"type", "error", "request_id"}
    assert body["error"]["type"] == kind
    assert body["request_id"] == response.headers["request-id"]
    message: str = body["error"]["message"]
    return message


def test_answers_whole(claude: anthropic.Anthropic) -> None:
    message = ask(claude)
    assert [block.model_dump()["text"] for block in message.content] == [ANSWER]
    assert message.stop_reason == "end_turn"
    assert message.stop_sequence is None
    assert message.model == MODEL
    assert message.usage.output_tokens > 5


def test_streams_what_it_answers_whole(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    with claude.messages.stream(
        model=MODEL, messages=QUESTION, max_tokens=50, extra_body=GREEDY
    ) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final, whole = stream.get_final_message(), ask(claude)
        assert final.stop_reason == whole.stop_reason
        assert final.usage.output_tokens == whole.usage.output_tokens
    types = [event["type"] for event in events(http)]
    num_deltas = types.count("content_block_delta")
    assert num_deltas > 5
    assert types == [
        *("message_start", "ping", "content_block_start"),
        *["content_block_delta"] * num_deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]


@pytest.mark.parametrize("streamed", [False, True])
def test_why_it_stopped(claude: anthropic.Anthropic, streamed: bool) -> None:
    def ended(**fields: Any) -> tuple[str | None, str | None]:
        if not streamed:
            message = ask(claude, **fields)
            return message.stop_reason, message.stop_sequence
        fields = {"max_tokens": 50, "extra_body": GREEDY, **fields}
        with claude.messages.stream(model=MODEL, messages=QUESTION, **fields) as stream:
            final = stream.get_final_message()
        return final.stop_reason, final.stop_sequence

    assert ended(max_tokens=3) == ("max_tokens", None)
    assert ended(stop_sequences=["Rome", "Paris"]) == ("stop_sequence", "Paris")


def test_system_and_blocks_are_the_same_as_texts(claude: anthropic.Anthropic) -> None:
    text = "You are terse."
    blocks: Any = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
    content = [{"type": "text", "text": QUESTION[0]["content"]}]
    told, written = (
        ask(claude, system=text),
        ask(claude, [{"role": "user", "content": content}], system=blocks),
    )
    assert told.content == written.content
    count = claude.messages.count_tokens(model=MODEL, messages=QUESTION, system=text)
    cached = written.usage.cache_read_input_tokens or 0
    assert count.input_tokens == written.usage.input_tokens + cached
    assert (
        count.input_tokens
        != claude.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
    )


def test_a_last_message_of_the_assistant_is_gone_on_with(claude: anthropic.Anthropic) -> None:
    begun: Any = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    message = ask(claude, begun, max_tokens=1)
    assert message.content[0].model_dump()["text"] == " Paris"


def test_a_tool_is_used_and_its_result_answered(claude: anthropic.Anthropic) -> None:
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    fields: dict[str, Any] = {
        "tools": [WEATHER],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    message = ask(claude, asked, **fields)
    assert message.stop_reason == "tool_use"
    [used] = message.content
    assert used.type == "tool_use"
    assert used.input == {"city": "Paris"}
    with claude.messages.stream(
        model=MODEL, messages=asked, max_tokens=50, extra_body=GREEDY, **fields
    ) as stream:
        [streamed] = stream.get_final_message().content
    assert (streamed.type, streamed.input) == ("tool_use", used.input)
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "It is sunny."}
    told = [
        *asked,
        {"role": "assistant", "content": [used.model_dump()]},
        {"role": "user", "content": [result]},
    ]
    assert ask(claude, told, tools=[WEATHER], max_tokens=3).stop_reason == "max_tokens"
    count = claude.messages.count_tokens(model=MODEL, messages=told, tools=[WEATHER])
    without = claude.messages.count_tokens(model=MODEL, messages=told)
    assert count.input_tokens > without.input_tokens + 20


def test_output_has_the_form_of_a_schema(claude: anthropic.Anthropic) -> None:
    schema = {k: v for k, v in WEATHER["input_schema"].items() if k != "description"}
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    [block] = ask(claude, output_config=form, max_tokens=60).content
    assert list(json.loads(block.model_dump()["text"])) == ["city"]


def test_the_older_name_of_the_form_means_the_same(http: httpx.Client) -> None:
    form = {"type": "json_schema", "schema": WEATHER["input_schema"]}
    body = {"messages": QUESTION, "max_tokens": 60, **GREEDY}
    old = http.post("/v1/messages", json={**body, "output_format": form}).json()
    new = http.post("/v1/messages", json={**body, "output_config": {"format": form}}).json()
    assert list(json.loads(old["content"][0]["text"])) == ["city"]
    assert old["content"] == new["content"]


def test_the_note_for_accounts_is_left_out(claude: anthropic.Anthropic) -> None:
    def count(system: Any) -> int:
        return claude.messages.count_tokens(
            model=MODEL, messages=QUESTION, system=system
        ).input_tokens

    note = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.331.471;"}
    told = {"type": "text", "text": "You are terse."}
    assert count([note, told]) == count([told])
    assert (
        count([note]) == claude.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
    )


def test_a_tool_runner_goes_on_without_a_thread(
    claude: anthropic.Anthropic, http: httpx.Client
) -> None:
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Tells the weather in a city."""
        cities.append(city)
        return "It is sunny."

    cities: list[str] = []
    runner = claude.beta.messages.tool_runner(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        max_tokens=50,
        tools=[get_weather],
        tool_choice={"type": "tool", "name": "get_weather"},
        max_iterations=2,
        extra_body=GREEDY,
    )
    assert [message.stop_reason for message in runner] == ["tool_use", "tool_use"]
    assert cities[0]
    body = {"messages": QUESTION, "max_tokens": 5, "thread": {"type": "create"}}
    refused = http.post("/v1/messages", json=body)
    check(refused, 400, "invalid_request_error")
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert refused.json()["error"]["details"] == details


def test_a_request_of_claude_code(http: httpx.Client) -> None:
    """Its fields and their values, as version 2.1.331 sends them, with fewer tools and words."""
    sent = {
        "model": MODEL,
        "messages": [
            {"role": "user", "content": [
                {"type": "text", "text": "<system-reminder>\nBe brief.\n</system-reminder>\n"},
                {"type": "text", "text": "Say hi"}]},
            {"role": "system", "content": [
                {"type": "text", "text": "# Environment\n - Platform: linux",
                 "cache_control": {"type": "ephemeral"}}]},
        ],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.331.471;"},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        ],
        "tools": [{**WEATHER, "eager_input_streaming": True}],
        "metadata": {"user_id": '{"device_id": "2", "account_uuid": "", "session_id": "c"}'},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stop_sequences": ["\n"],
    }  # fmt: skip
    *_, end, stop = events(http, **sent)
    assert stop == {"type": "message_stop"}
    assert end["delta"]["stop_reason"] in ("end_turn", "stop_sequence", "tool_use")
    assert end["context_management"] == {"applied_edits": []}


def test_a_server_is_found(http: httpx.Client) -> None:
    """Coding agents ask before their first request."""
    found = http.head("/")
    assert (found.status_code, found.content) == (200, b"")


def test_what_other_clients_send_is_accepted(claude: anthropic.Anthropic) -> None:
    ask(
        claude,
        max_tokens=1,
        cache_control={"type": "ephemeral"},
        metadata={"user_id": "somebody"},
        service_tier="auto",
        thinking={"type": "disabled", "display": "omitted"},
        output_config={"effort": "high"},
        tool_choice={"type": "auto"},
        extra_body={"temperature": 1.0, "top_k": 5, "top_p": 0.9, "slo_class": "batch"},
        extra_headers={"anthropic-version": "2023-06-01"},
        extra_query={"beta": "true"},
    )


def test_lists_the_model(claude: anthropic.Anthropic) -> None:
    [model] = claude.models.list()
    assert model.id == model.display_name == MODEL
    assert model.type == "model"
    assert model.created_at.year > 2000
    assert claude.models.retrieve(MODEL).id == MODEL


def test_a_client_that_goes_away_frees_its_request(server: ServerProcess) -> None:
    body = {"messages": QUESTION, "max_tokens": 5000, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/messages", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.wait_for_metric("num_requests_running", 1)
    server.wait_for_metric("num_requests_running", 0)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"frobnicate": 1}, "frobnicate is not supported"),
        ({"container": "c"}, "container is not supported"),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages.0.role: "),
        ({"messages": [{"role": "user"}]}, "messages.0.content is missing"),
        (
            {"messages": [*QUESTION, {"role": "user", "content": [{"type": "image"}]}]},
            'messages.1.content.0: a block of type "image"',
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text is missing",
        ),
        ({"messages": [{"role": "user", "content": "very " * 9000}]}, "context length"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type: "),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: is missing"),
        ({"tool_choice": {"type": "sometimes"}}, "tool_choice.type: "),
        ({"tools": [{**WEATHER, "input_schema": {"type": "x"}}]}, "tools.0.input_schema.type: "),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "g"}}, "no tool 'g'"),
        (
            {
                "tools": [WEATHER, {"name": "f", "strict": True, "input_schema": _UNKNOWN}],
                "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
            },
            "Unknown format: no-such, at #/properties/a of the schema",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens: "),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences: "),
        ({"stop_sequences": ["x" * 5000]}, "stop_sequences"),
        ({"service_tier": "priority"}, "service_tier: "),
        ({"thread": {"type": "continue", "previous_message_id": "m"}}, "thread: "),
        (
            {
                "output_format": {"type": "json_schema", "schema": {"type": "x"}},
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            "output_format is the old name",
        ),
    ],
)
def test_what_is_refused(http: httpx.Client, fields: dict[str, Any], where: str) -> None:
    body = {"messages": QUESTION, "max_tokens": 5, **fields}
    message = check(http.post("/v1/messages", json=body), 400, "invalid_request_error")
    assert where in message


def test_other_errors_have_the_same_shape(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    with pytest.raises(anthropic.NotFoundError) as raised:
        claude.messages.create(model="claude", messages=QUESTION, max_tokens=5)
    assert raised.value.type == "not_found_error"
    assert raised.value.request_id
    check(http.post("/v1/messages/batches", json={}), 404, "not_found_error")
    check(http.get("/v1/messages"), 405, "invalid_request_error")
    check(http.post("/v1/messages", content=b"{"), 400, "invalid_request_error")
    body = b'{"messages": "' + b"x" * 2**23 + b'"}'
    headers = {"Content-Type": "application/json"}
    too_large = http.post("/v1/messages", content=body, headers=headers)
    check(too_large, 413, "request_too_large")
    elsewhere = http.get("/v1/messages-of-others")
    assert set(elsewhere.json()["error"]) == {"message", "type", "param", "code"}
    assert "request-id" not in elsewhere.headers


def _tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}, **fields}


def _found(*names: str) -> list[dict[str, Any]]:
    references = [{"type": "tool_reference", "tool_name": name} for name in names]
    use = {"type": "tool_use", "id": "toolu_1", "name": "find", "input": {"query": "rain"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": references}
    return [
        {"role": "user", "content": "Will it rain?"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]


def test_a_deferred_tool_is_known_once_it_is_found(http: httpx.Client) -> None:
    tools = [
        _tool("forecast", defer_loading=True),
        _tool("find"),
        _tool("stocks", defer_loading=True),
    ]

    def prompt(tools: list[dict[str, Any]], **fields: Any) -> str:
        body = {"messages": _found("forecast"), "max_tokens": 1, "tools": tools, **fields}
        rendered = http.post("/v1/messages/render", json=body).json()
        return str(
            http.post("/detokenize", json={"tokens": rendered["token_ids"]}).json()["prompt"]
        )

    known = prompt(tools)
    assert '"name": "forecast"' in known
    assert '"name": "stocks"' not in known
    assert known == prompt([_tool("forecast"), _tool("find")])
    hidden = prompt(tools, messages=[{"role": "user", "content": "Hi"}])
    assert '"name": "find"' in hidden
    assert '"name": "forecast"' not in hidden
    assert '"name": "stocks"' in prompt(tools, tool_choice={"type": "tool", "name": "stocks"})
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    assert '"name": "stocks"' in prompt([search, *tools])
    body = {"messages": _found("forecast"), "max_tokens": 1, "tools": [search, *tools]}
    answer = http.post("/v1/messages", json=body)
    assert "tool_search_tool_regex_20251119" in answer.headers["Warning"]


@pytest.mark.parametrize(
    ("tools", "told"),
    [
        ([_tool("a", defer_loading=True)], "defer_loading"),
        ([{"name": "a"}], "tools.0.input_schema"),
        ([_tool("a", defer_loading=True), _tool("b", input_schema={"type": "array"})],
         "tools.1.input_schema.type"),
    ],
)  # fmt: skip
def test_tools_that_are_refused(http: httpx.Client, tools: list[Any], told: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    answer = http.post("/v1/messages", json={"messages": messages, "max_tokens": 1, "tools": tools})
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]
