"""A response in the background ends once, and shares the bytes that it repeats."""

import asyncio
import gc
import json
import re
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.api.limits import MAX_REPEATED_BYTES, MAX_REPEATED_FIELD_BYTES
from legato.api.responses.background import BackgroundRun
from legato.api.responses.response_body import ResponsesRequest
from legato.core.errors import InvalidRequestError
from legato.core.outputs import FinishReason
from tests.api.background_runs import background_run, context, iterations, say
from tests.profiles import examples

LONG = "y" * 2**18
"""A text whose JSON is made in several turns of the event loop."""
HUGE = "x" * MAX_REPEATED_BYTES
FUNCTION = {"type": "function", "name": "f"}
TOO_LONG: dict[str, Any] = {
    "instructions": HUGE,
    "metadata": {"a": HUGE},
    "previous_response_id": HUGE,
    "prompt_cache_key": HUGE,
    "reasoning": {"effort": HUGE},
    "safety_identifier": HUGE,
    "text": {"format": {"type": "text", "description": HUGE}},
    "tool_choice": {"type": "web_search", "more": HUGE},
    "tools": [{"type": "mcp", "more": HUGE}],
    "user": HUGE,
}
"""Key a field that a response repeats, value one that is too long."""
TOO_LONG_WITHIN: list[dict[str, Any]] = [
    {"text": {"format": {"type": "json_schema", "schema": {"title": HUGE}}}},
    {"text": {"format": {"type": "json_schema", "schema": {}, "name": HUGE}}},
    {"tools": [{**FUNCTION, "description": HUGE}]},
    {"tools": [{**FUNCTION, "name": HUGE}]},
    {"tools": [{**FUNCTION, "parameters": {"title": HUGE}}]},
    {"tools": [{**FUNCTION, "output_schema": {"title": HUGE}}]},
    {"tools": [{"type": "namespace", "name": "n", "description": HUGE, "tools": []}]},
    {"tools": [{"type": "custom", "name": "n", "description": HUGE}]},
    {"tool_choice": {**FUNCTION, "more": HUGE}},
    {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{**FUNCTION, "a": HUGE}]}},
    {"instructions": LONG, "tools": [{"type": "mcp", "more": 2 * LONG[:-99]}], "metadata": {}}
    | {"text": {"format": {"type": "text", "description": 2 * LONG[:-99]}}},
]


@examples(60)
@given(
    gaps=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    num_deltas=st.integers(0, 2),
    is_complete=st.booleans(),
)
def test_a_response_ends_once(gaps: list[int], num_deltas: int, is_complete: bool) -> None:
    ends: list[str] = []

    def finish(body: list[bytes]) -> bool:
        ends.append(json.loads(b"".join(body))["status"])
        return True

    async def main() -> None:
        a_context = context()
        run = background_run(a_context, finish)
        await iterations(gaps[0])
        submissions = a_context.engine.submissions
        if submissions:
            for _ in range(num_deltas):
                say(submissions[0], LONG)
            if is_complete:
                say(submissions[0], "!", FinishReason.STOP)
        clients = []
        for gap in gaps:
            clients.append(asyncio.create_task(run.cancelled()))
            await iterations(gap)
        await asyncio.wait_for(run.begun(), 60)
        await asyncio.wait(clients, timeout=60)
        told = b"".join(await followed(run))
        assert told.count(b"event: response.completed") == ends.count("completed")

    asyncio.run(main())
    assert ends in (["cancelled"], ["completed"])


async def followed(run: BackgroundRun, number: int = -1) -> list[bytes]:
    """All that a client of the events after one is sent."""
    assert run.log is not None
    return [data async for data in run.log.after(number)]


async def completed(
    texts: list[str], a_context: Any = None, **fields: Any
) -> tuple[BackgroundRun, list[bytes]]:
    """A run that is over, and the response as it is stored. Args: fields: of the request."""
    stored: list[list[bytes]] = []

    def finish(body: list[bytes]) -> bool:
        stored.append(body)
        return True

    a_context = a_context or context()
    run = background_run(a_context, finish, **fields)
    await run.begun()
    submission = a_context.engine.submissions.pop()
    for text in texts:
        say(submission, text)
    say(submission, "", FinishReason.STOP)
    await followed(run)
    return run, stored[0]


some_text = st.builds(
    lambda text, number: text * number,
    st.text(st.sampled_from("a\x85\u2028\u2029\n\r\\é"), max_size=3),
    st.sampled_from([1, 7, 3000, 40_000]),
)


@examples(60)
@given(texts=st.lists(some_text, max_size=3), instructions=some_text, number=st.integers(-1, 9))
def test_any_client_of_the_events_reads_the_stored_response(
    texts: list[str], instructions: str, number: int
) -> None:
    async def main() -> None:
        run, stored = await completed(texts, instructions=instructions)
        events = [event for event in b"".join(await followed(run)).split(b"\n\n") if event]
        shown = [json.loads(event.partition(b"data: ")[2]) for event in events]
        assert [event["sequence_number"] for event in shown] == list(range(len(events)))
        # Many clients cut lines at each of these.
        assert all(len(event.decode().splitlines()) == 2 for event in events)
        assert shown[-1]["response"] == json.loads(b"".join(stored))
        assert shown[0]["response"]["instructions"] == instructions
        assert "".join(one.get("delta", "") for one in shown) == "".join(texts)
        rest = b"".join(await followed(run, number)).split(b"\n\n")[:-1]
        assert rest == events[number + 1 :]

    asyncio.run(main())


def test_events_clients_and_the_store_share_what_a_response_repeats() -> None:
    async def main() -> None:
        tools = [{"type": "mcp", "more": LONG}]
        a_context = context()
        await completed(["Hi"], a_context)  # loads what is loaded once
        tracemalloc.start()
        runs = [await completed(["Hi"], a_context, tools=tools) for _ in range(8)]
        clients = []
        for run, _ in runs:
            assert run.log is not None
            clients += [run.log.after(-1) for _ in range(8)]
        first = [await anext(client) for client in clients]
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert max(map(len, first)) <= 2**17
        assert used - sum(map(len, first)) < len(runs) * 2 * len(LONG)
        for client in clients:
            await client.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("is_over", [False, True])
def test_clients_of_a_response_that_is_not_stored_get_an_error(is_over: bool) -> None:
    async def main() -> None:
        if is_over:
            run, _ = await completed([LONG])
        else:
            run = background_run(context(), lambda _: True)
            await run.begun()
        assert run.log is not None
        has_read_all = await followed(run) if is_over else []
        client = run.log.after(-1)
        await anext(client)
        run.drop()
        rest = b"".join([data async for data in client])
        assert (b"event: error" in rest) != is_over, "what was sent already is read to its end"
        [told] = await followed(run)
        assert json.loads(told.partition(b"data: ")[2])["code"] == "response_not_stored"
        assert b"event: error" not in b"".join(has_read_all)

    asyncio.run(main())


def is_bounded(schema: dict[str, Any]) -> bool:
    """Whether a field of a request is short, for any value."""
    if "anyOf" in schema:
        return all(map(is_bounded, schema["anyOf"]))
    if "enum" in schema or "const" in schema or "maxLength" in schema:
        return True
    return schema.get("type") in ("integer", "number", "boolean", "null")


def test_every_field_that_a_response_repeats_is_short_or_tried() -> None:
    fields = ResponsesRequest.model_json_schema()["properties"]
    shown = ResponsesRequest.model_validate({"input": "Hi"}).shown()
    assert {name for name in shown if not is_bounded(fields[name])} <= TOO_LONG.keys()


@pytest.mark.parametrize(
    "fields",
    [*({name: value} for name, value in TOO_LONG.items()), *TOO_LONG_WITHIN],
    ids=lambda fields: str(fields)[:50].replace("x" * 9, ""),
)
def test_a_long_field_is_not_repeated(fields: dict[str, Any]) -> None:
    with pytest.raises((ValueError, InvalidRequestError)) as caught:
        ResponsesRequest.model_validate({"input": "Hi", **fields}).shown()
    [name, *_] = re.findall("|".join(TOO_LONG), str(caught.value)) or [None]
    assert name in fields or getattr(caught.value, "param", None) in fields


def test_a_field_may_be_as_long_as_it_says() -> None:
    text = "x" * (MAX_REPEATED_FIELD_BYTES - len('""'))
    request = ResponsesRequest.model_validate({"input": "Hi", "instructions": text})
    assert request.shown()["instructions"] == f'"{text}"'.encode()
