"""What the official clients make of a stream's events is what the whole answer is."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from legato.api.anthropic.output_blocks import ContentBlocks
from legato.api.http.bodies import TypedEvent, typed_event_pieces
from legato.api.responses.input_items import messages_of, read_items
from legato.api.responses.output_items import OutputItems
from legato.api.responses.response_events import EventNumbers
from legato.language.message.message import MessageDelta, MessagePart, TextSpan, ToolCallDelta
from tests.profiles import examples

_response_event: Any = TypeAdapter(ResponseStreamEvent).validate_python
_message_event: Any = TypeAdapter(RawMessageStreamEvent).validate_python
_texts = st.text(max_size=4)


@st.composite
def messages(draw: st.DrawFn) -> list[MessageDelta]:
    """The deltas of a message: reasoning, content and calls of tools, several in one delta."""
    parts: list[MessagePart] = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from(["reasoning", "content", "call"]), max_size=8)):
        if kind == "call":
            text = msgspec.json.encode({"city": draw(_texts)}).decode()
            cut = draw(st.integers(0, len(text)))
            parts.append(ToolCallDelta(num_calls, f"call_{num_calls}", "weather", text[:cut]))
            parts.append(ToolCallDelta(num_calls, None, None, text[cut:]))
            num_calls += 1
        else:
            texts = draw(st.lists(_texts, min_size=1, max_size=3))
            parts += [TextSpan(text, 0, is_reasoning=kind == "reasoning") for text in texts if text]
    cuts = sorted(draw(st.lists(st.integers(0, len(parts)), max_size=8)))
    return [
        MessageDelta(tuple(parts[start:end])) for start, end in pairwise([0, *cuts, len(parts)])
    ]


def no_logprobs(_span: TextSpan) -> tuple[()]:
    return ()


def sent(pieces: Iterable[bytes]) -> list[dict[str, Any]]:
    """Events as they came; each has the name that its data says."""
    found = []
    lines = b"".join(pieces).decode().splitlines()
    for name, body, empty in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        found.append(msgspec.json.decode(body.removeprefix("data: ")))
        assert (name, empty) == ("event: " + found[-1]["type"], "")
    return found


def shown(item: Any) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(item))
    return found


@examples(150)
@given(deltas=messages())
def test_openais_client_puts_a_response_together(deltas: list[MessageDelta]) -> None:
    items = OutputItems("abc", {})
    events: list[TypedEvent] = [
        event for delta in deltas for event in items.take(delta, no_logprobs)
    ]
    events += items.close("completed")
    response: dict[str, Any] = {
        "id": "resp_abc",
        "object": "response",
        "created_at": 0,
        "model": "m",
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
    state: Any = ResponseStreamState(input_tools=omit, text_format=omit)
    state.handle_event(
        _response_event({"type": "response.created", "sequence_number": 0, "response": response})
    )
    for event in sent(typed_event_pieces(events, EventNumbers().encode)):
        state.handle_event(_response_event(event))
    response["output"] = [shown(item) for item in items.done]
    last = {"type": "response.completed", "sequence_number": 99, "response": response}
    state.handle_event(_response_event(last))
    gathered = [state._output_items[index] for index in sorted(state._output_items)]
    assert [item.type for item in gathered] == [item["type"] for item in response["output"]]
    for item, whole in zip(gathered, response["output"], strict=True):
        if whole["type"] == "message":
            assert item.content[0].text == whole["content"][0]["text"]
        elif whole["type"] == "function_call":
            assert item.arguments == whole["arguments"]
    assert "".join(delta.content for delta in deltas) == "".join(
        item["content"][0]["text"] for item in response["output"] if item["type"] == "message"
    )
    assert "".join(delta.reasoning for delta in deltas) == "".join(
        item["content"][0]["text"] for item in response["output"] if item["type"] == "reasoning"
    )


@examples(100)
@given(deltas=messages())
def test_a_stored_response_is_read_as_what_was_said(deltas: list[MessageDelta]) -> None:
    items = OutputItems("abc", {})
    for delta in deltas:
        items.take(delta, no_logprobs)
    items.close("completed")
    read: Any = read_items([shown(item) for item in items.done])
    told = [message for _, message in messages_of(("output", item) for item in read)]
    assert {message["role"] for message in told} == {"assistant"}
    for name, key in (("content", "content"), ("reasoning", "reasoning_content")):
        said = "".join(getattr(delta, name) for delta in deltas)
        assert said == "".join(message.get(key) or "" for message in told)
    calls = [call for message in told for call in message.get("tool_calls", ())]
    assert [call["id"] for call in calls] == [
        call.id for delta in deltas for call in delta.tool_calls if call.id is not None
    ]


@examples(150)
@given(deltas=messages(), omits_thinking=st.booleans())
def test_anthropics_client_puts_a_message_together(
    deltas: list[MessageDelta], omits_thinking: bool
) -> None:
    blocks = ContentBlocks(omits_thinking=omits_thinking)
    events: list[TypedEvent] = [event for delta in deltas for event in blocks.take(delta)]
    events += blocks.close()
    start: dict[str, Any] = {
        "id": "msg_abc",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "usage": {"input_tokens": 1, "output_tokens": 0},
    }
    buffers: dict[int, bytes] = {}
    message: Any = None
    for event in [{"type": "message_start", "message": start}, *sent(typed_event_pieces(events))]:
        message = accumulate_event(
            event=_message_event(event), current_snapshot=message, json_bufs=buffers
        )
    gathered = [block.to_dict() for block in message.content]
    assert gathered == [shown(block) for block in blocks.done]
    assert "".join(delta.content for delta in deltas) == "".join(
        block["text"] for block in gathered if block["type"] == "text"
    )


@pytest.mark.parametrize(
    "text", ["[1", "[1]", "null", '{"a": NaN}', '{"a": ' + "[" * 2000 + "]" * 2000 + "}"]
)
def test_a_call_that_is_no_object_is_shown_as_it_is(text: str) -> None:
    blocks = ContentBlocks()
    blocks.take(MessageDelta((ToolCallDelta(0, "call_0", "weather", text),)))
    blocks.close()
    [block] = map(shown, blocks.done)
    assert block["input"] == {"invalid": text}


@pytest.mark.parametrize(
    "text", ['{"a":1e999}', f'{{"a":{10**40}}}', '{"a":0.10}', '{"a":"\\ud83d"}', '{"a":1,"a":2}']
)
def test_a_calls_object_is_the_models_own_json(text: str) -> None:
    blocks = ContentBlocks()
    blocks.take(MessageDelta((ToolCallDelta(0, "call_0", "weather", text),)))
    blocks.close()
    assert text.encode() in msgspec.json.encode(blocks.done)
