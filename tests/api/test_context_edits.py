"""`context_management` of /v1/messages: what is cleared, and what answers and counts say of it."""

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types.beta import BetaMessage

from legato.api.anthropic.context_edits import ContextManagement, edited
from legato.api.anthropic.input_blocks import AnthropicMessage, assistant_message
from legato.api.anthropic.output_blocks import ContentBlocks
from legato.language.message.message import MessageDelta, TextSpan
from tests.api.launch import MODEL, ServerProcess

CLEARED = "[This result was cleared to shorten the conversation.]"
LONG = "It is sunny, and so it was yesterday. " * 10


def turn(number: int, result: str = LONG) -> list[dict[str, Any]]:
    """A user's question, a call by a thinking model, its result, and the answer."""
    called = {"type": "tool_use", "id": f"t{number}", "name": "look", "input": {"at": "the sky"}}
    return [
        {"role": "user", "content": f"Question {number}?"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, called]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": f"t{number}", "content": result},
            {"type": "text", "text": "A reminder."}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "So."}, {"type": "text", "text": "Sunny."}]},
    ]  # fmt: skip


CONVERSATION = [*turn(1), *turn(2), *turn(3), {"role": "user", "content": "And now?"}]
TOOL_USES = "clear_tool_uses_20250919"
THINKING = "clear_thinking_20251015"
ALWAYS = {"type": TOOL_USES, "trigger": {"type": "tool_uses", "value": 0}}


def clear(*edits: dict[str, Any]) -> dict[str, Any]:
    return {"edits": list(edits)}


def left_of(edit: dict[str, Any], messages: list[dict[str, Any]] = CONVERSATION) -> Any:
    """The messages that one edit leaves, and what it reports, where a character is a token."""
    edits = ContextManagement.model_validate(clear(edit)).edits
    given = [AnthropicMessage.model_validate(message) for message in messages]
    left, applied = edited(given, edits, lambda some: sum(len(m.model_dump_json()) for m in some))
    return [message.model_dump(exclude_unset=True) for message in left], applied


def thoughts(messages: list[dict[str, Any]]) -> list[int]:
    return [
        index
        for index, message in enumerate(messages)
        if any(block["type"] == "thinking" for block in message["content"])
    ]


def results(messages: list[dict[str, Any]]) -> list[str]:
    return [
        "".join(text["text"] for text in block["content"])
        for message in messages
        for block in message["content"]
        if block["type"] == "tool_result"
    ]


@pytest.mark.parametrize(
    ("keep", "thinking", "num_cleared"),
    [
        ({}, [9, 11], 2),
        ({"keep": {"type": "thinking_turns", "value": 2}}, [5, 7, 9, 11], 1),
        ({"keep": {"type": "thinking_turns", "value": 3}}, [1, 3, 5, 7, 9, 11], 0),
        ({"keep": "all"}, [1, 3, 5, 7, 9, 11], 0),
        ({"keep": {"type": "all"}}, [1, 3, 5, 7, 9, 11], 0),
    ],
)
def test_the_thinking_of_old_turns_goes(
    keep: dict[str, Any], thinking: list[int], num_cleared: int
) -> None:
    left, applied = left_of({"type": THINKING, **keep})
    assert thoughts(left) == thinking
    assert [edit.cleared_thinking_turns for edit in applied] == [num_cleared] * bool(num_cleared)
    assert all(edit.cleared_input_tokens > 0 for edit in applied)


@pytest.mark.parametrize(
    ("fields", "gone"),
    [
        ({"keep": {"type": "tool_uses", "value": 1}}, [True, True, False]),
        ({"keep": {"type": "tool_uses", "value": 0}}, [True, True, True]),
        ({}, [False, False, False]),
        ({"keep": {"type": "tool_uses", "value": 0}, "exclude_tools": ["look"]}, [False] * 3),
        ({"keep": {"type": "tool_uses", "value": 1},
          "trigger": {"type": "tool_uses", "value": 3}}, [False] * 3),
        ({"keep": {"type": "tool_uses", "value": 1},
          "trigger": {"type": "input_tokens", "value": 100}}, [True, True, False]),
        ({"keep": {"type": "tool_uses", "value": 1},
          "trigger": {"type": "input_tokens", "value": 10**6}}, [False] * 3),
        ({"keep": {"type": "tool_uses", "value": 1},
          "clear_at_least": {"type": "input_tokens", "value": 10**6}}, [False] * 3),
    ],
)  # fmt: skip
def test_old_results_go(fields: dict[str, Any], gone: list[bool]) -> None:
    left, applied = left_of({**ALWAYS, **fields})
    assert results(left) == [CLEARED if is_gone else LONG for is_gone in gone]
    assert [edit.cleared_tool_uses for edit in applied] == [sum(gone)] * any(gone)
    assert left[1]["content"][1]["input"] == {"at": "the sky"}


@pytest.mark.parametrize(("cleared", "is_empty"), [(True, True), (["look"], True), (["x"], False)])
def test_inputs_go_with_results_if_asked(cleared: Any, is_empty: bool) -> None:
    fields = {"keep": {"type": "tool_uses", "value": 2}, "clear_tool_inputs": cleared}
    left, _ = left_of({**ALWAYS, **fields})
    assert left[1]["content"][1]["input"] == ({} if is_empty else {"at": "the sky"})
    assert left[5]["content"][1]["input"] == {"at": "the sky"}


@pytest.fixture
def claude(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


EDITS: Any = clear({"type": THINKING}, {**ALWAYS, "keep": {"type": "tool_uses", "value": 1}})


def test_the_model_reads_what_is_left(claude: anthropic.Anthropic) -> None:
    fields: Any = {"model": MODEL, "max_tokens": 4, "extra_body": {"temperature": 0}}
    by_hand: Any = [*turn(1, CLEARED), *turn(2, CLEARED), *CONVERSATION[8:]]
    messages: Any = CONVERSATION
    written = claude.beta.messages.create(messages=by_hand, **fields)
    cleared = claude.beta.messages.create(messages=messages, context_management=EDITS, **fields)
    assert cleared.content == written.content
    assert total(cleared) == total(written)
    assert cleared.context_management is not None
    # SmolLM2's template writes no thinking, so clearing it saves no tokens.
    thinking, uses = cleared.context_management.applied_edits
    assert thinking.type == THINKING
    assert (thinking.cleared_thinking_turns, thinking.cleared_input_tokens) == (2, 0)
    assert uses.type == TOOL_USES
    assert uses.cleared_tool_uses == 2
    with claude.beta.messages.stream(
        messages=messages, context_management=EDITS, **fields
    ) as stream:
        assert stream.get_final_message().context_management == cleared.context_management
    count = claude.beta.messages.count_tokens(
        model=MODEL, messages=messages, context_management=EDITS
    )
    assert count.input_tokens == total(written)
    assert count.context_management is not None
    before = count.context_management.original_input_tokens
    assert before == count.input_tokens + uses.cleared_input_tokens
    assert before == claude.beta.messages.count_tokens(model=MODEL, messages=messages).input_tokens


def total(message: BetaMessage) -> int:
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_a_prompt_that_is_too_long_may_fit_when_it_is_edited(claude: anthropic.Anthropic) -> None:
    messages: Any = [*turn(1, "very " * 9000), {"role": "user", "content": "And now?"}]
    fields: Any = {"model": MODEL, "max_tokens": 1}
    with pytest.raises(anthropic.BadRequestError, match="context length"):
        claude.beta.messages.create(messages=messages, **fields)
    edits: Any = clear({**ALWAYS, "keep": {"type": "tool_uses", "value": 0}})
    answer = claude.beta.messages.create(messages=messages, context_management=edits, **fields)
    assert answer.stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("edit", "where"),
    [
        ({"type": "compact_20260112"}, 'edits.0: an edit of type "compact_20260112"'),
        ({"type": THINKING, "keep": {"type": "thinking_turns"}}, "edits.0.keep.value: "),
        ({"type": THINKING, "keep": "some"}, "edits.0.keep: "),
        ({"type": TOOL_USES, "keep": {"type": "tool_uses", "value": -1}}, "edits.0.keep.value: "),
        ({"type": TOOL_USES, "frobnicate": 1}, "edits.0.frobnicate is not supported"),
    ],
)
def test_edits_that_are_refused(http: httpx.Client, edit: dict[str, Any], where: str) -> None:
    body = {"messages": CONVERSATION, "max_tokens": 1, "context_management": clear(edit)}
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert f"context_management.{where}" in answer.json()["error"]["message"]


def test_omitted_thinking_comes_back_in_the_signature() -> None:
    blocks = ContentBlocks(omits_thinking=True)
    deltas = [delta(text, is_reasoning=True) for text in ("Hm, ", "sunny.")]
    deltas.append(delta("Sunny.", is_reasoning=False))
    events = [event for each in deltas for event in blocks.take(each)] + blocks.close()
    assert [type(event).__name__ for event in events] == [
        *("BlockStart", "BlockDelta", "BlockStop", "BlockStart", "BlockDelta", "BlockStop")
    ]
    thinking, _ = blocks.done
    shown: Any = {
        "type": "thinking",
        "thinking": thinking.thinking,
        "signature": thinking.signature,
    }  # type: ignore[union-attr]
    assert shown["thinking"] == ""
    assert events[1].delta.signature == shown["signature"]  # type: ignore[attr-defined]
    message = {"role": "assistant", "content": [shown]}
    sent_back = AnthropicMessage.model_validate(message)
    assert assistant_message(sent_back.content)["reasoning_content"] == "Hm, sunny."
    for foreign in ("EqQBCkYIBRgCKkA", "legato.%%%", ""):
        block = {"type": "thinking", "thinking": "", "signature": foreign}
        message = {"role": "assistant", "content": [block]}
        read = AnthropicMessage.model_validate(message)
        assert "reasoning_content" not in assistant_message(read.content)


def delta(text: str, *, is_reasoning: bool) -> MessageDelta:
    return MessageDelta((TextSpan(text, 0, is_reasoning),))
