"""Items of OpenAI's Responses API, sent and stored: as chat messages, and their truncation."""

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Field, Tag, TypeAdapter, WithJsonSchema

from legato.api.bodies.body_model import AtMost, LenientModel, Name, by_type
from legato.api.bodies.chat_messages import TEXT_PARTS, CallArguments
from legato.api.job import InputItem
from legato.api.limits import MAX_CONTENT_PARTS, MAX_MESSAGES
from legato.api.responses.response_tools import called_name
from legato.language.conversation.rewrite import why_not_read
from legato.language.message.tools import CUSTOM_INPUT

_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "maxItems": MAX_CONTENT_PARTS}]
}


def _as_texts(value: Any) -> Any:
    return list(map(_part_text, value)) if isinstance(value, list) else [value]


def _part_text(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise ValueError(
            f"a content part of type {kind!r} is not supported{why_not_read(kind)}; parts are "
            '{"type": "input_text", "text": "..."}'
        )
    return part.get(TEXT_PARTS[kind])


Texts = Annotated[
    list[str], AtMost(MAX_CONTENT_PARTS), BeforeValidator(_as_texts), WithJsonSchema(_CONTENT)
]
"""The texts of a content, from one text or a list of parts."""


class MessageItem(LenientModel):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Texts

    def shown(self) -> dict[str, Any]:
        if self.role == "assistant":
            content = [{"type": "output_text", "text": t, "annotations": []} for t in self.content]
        else:
            content = [{"type": "input_text", "text": text} for text in self.content]
        return {"type": self.type, "role": self.role, "status": "completed", "content": content}


class FunctionCallItem(LenientModel):
    type: Literal["function_call"]
    call_id: Name
    name: Name
    namespace: Name | None = None
    arguments: CallArguments = "{}"

    def shown(self) -> dict[str, Any]:
        return {**self.model_dump(exclude_none=True), "status": "completed"}


class CustomToolCallItem(LenientModel):
    """Attributes: `input` is any text."""

    type: Literal["custom_tool_call"]
    call_id: Name
    name: Name
    namespace: Name | None = None
    input: str

    @property
    def arguments(self) -> str:
        """The same as a function's arguments, in JSON."""
        return json.dumps({CUSTOM_INPUT: self.input}, ensure_ascii=False)

    def shown(self) -> dict[str, Any]:
        return {**self.model_dump(exclude_none=True), "status": "completed"}


class ToolOutputItem(LenientModel):
    """The output of a function or of a custom tool."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Name
    output: Texts

    def shown(self) -> dict[str, Any]:
        output = "\n".join(self.output)
        return {**self.model_dump(), "output": output, "status": "completed"}


class ReasoningPart(LenientModel):
    text: str


_ReasoningParts = Annotated[list[ReasoningPart], AtMost(MAX_CONTENT_PARTS)]


class ReasoningItem(LenientModel):
    """Its summary is used if it has no content."""

    type: Literal["reasoning"]
    summary: _ReasoningParts = Field(default_factory=list)
    content: _ReasoningParts = Field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary)

    def shown(self) -> dict[str, Any]:
        summary = [{"type": "summary_text", "text": part.text} for part in self.summary]
        content = [{"type": "reasoning_text", "text": part.text} for part in self.content]
        return {"type": self.type, "summary": summary, "content": content}


class ItemReference(LenientModel):
    """Refers to an item of a stored response."""

    type: Literal["item_reference"] = "item_reference"
    id: Name


def _typed(item: Any) -> Any:
    """Add the type to messages and references, which may leave it out."""
    if isinstance(item, dict) and item.get("type") is None:
        return {**item, "type": "message" if "role" in item else "item_reference"}
    return item


Item = MessageItem | FunctionCallItem | CustomToolCallItem | ToolOutputItem | ReasoningItem
AnyItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[CustomToolCallItem, Tag("<custom_tool_call>")]
    | Annotated[ToolOutputItem, Tag("<tool_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    *by_type(
        "an item",
        *("message", "function_call", "custom_tool_call", "reasoning", "item_reference"),
        function_call_output="tool_output",
        custom_tool_call_output="tool_output",
    ),
    BeforeValidator(_typed),
]
Placed = tuple[str, Item]
"""An item, and the client's name of it."""
Items = Annotated[list[AnyItem], Field(fail_fast=True), AtMost(MAX_MESSAGES)]

read_items = TypeAdapter(Items).validate_python

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
"""Key the type of an item, value the prefix of its ids."""


def shown_item(item: Item) -> InputItem:
    """Return an item as it is stored, shown to clients and used in later turns."""
    return InputItem(_PREFIXES[item.type], msgspec.json.encode(item.shown())[1:])


def messages_of(items: Iterable[Placed]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Convert items to chat messages; items of one assistant turn become one message."""
    turn: dict[str, Any] = {}  # the assistant's message being built
    place = ""
    for name, item in items:
        if turn and not _continues(turn, item):
            yield place, turn
            turn = {}
        match item:
            case (
                MessageItem(role="assistant")
                | FunctionCallItem()
                | CustomToolCallItem()
                | ReasoningItem()
            ):
                place = place if turn else name
                turn = turn or {"role": "assistant", "content": None}
                _add(turn, item)
            case MessageItem():
                yield name, {"role": item.role, "content": "\n".join(item.content)}
            case ToolOutputItem():
                content = "\n".join(item.output)
                yield (name, {"role": "tool", "tool_call_id": item.call_id, "content": content})
    if turn:
        yield place, turn


def _continues(turn: dict[str, Any], item: Item) -> bool:
    """Whether an item belongs to the same message, in the order reasoning, text, calls."""
    match item:
        case FunctionCallItem() | CustomToolCallItem():
            return True
        case MessageItem(role="assistant"):
            return turn["content"] is None and "tool_calls" not in turn
        case _:
            return False


def _add(turn: dict[str, Any], item: Item) -> None:
    match item:
        case ReasoningItem():
            turn["reasoning_content"] = item.text
        case MessageItem():
            turn["content"] = "\n".join(item.content)
        case FunctionCallItem() | CustomToolCallItem():
            name = called_name(item.name, item.namespace)
            function = {"name": name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)


def truncated(items: Sequence[Placed], fits: Callable[[Sequence[Placed]], bool]) -> list[Placed]:
    """Drop as few of the first turns as needed; the last turn always stays.

    A turn begins with a user's message, so that no tool's output remains without its call. System
    messages stay.

    Args:
        fits: if true of some items, it is also true of fewer.
    """
    begins = [i for i, (_, item) in enumerate(items) if _is_of(item, "user")]
    cuts = begins if begins[:1] == [0] else [0, *begins]
    first = bisect_left(cuts[:-1], True, key=lambda cut: fits(_from(items, cut)))
    return _from(items, cuts[first])


def _from(items: Sequence[Placed], cut: int) -> list[Placed]:
    told = [placed for placed in items[:cut] if _is_of(placed[1], "system", "developer")]
    return [*told, *items[cut:]]


def _is_of(item: Item, *roles: str) -> bool:
    return isinstance(item, MessageItem) and item.role in roles


class StoredOutput(msgspec.Struct, frozen=True):
    """The parts of a stored answer that parsing needs."""

    id: str
    output: list[dict[str, object]]
    previous_response_id: str | None = None


class StoredTurn(msgspec.Struct, frozen=True):
    """One stored response.

    Attributes:
        input: its items, each with its id.
    """

    input: list[dict[str, object]]
    response: StoredOutput


_decode = msgspec.json.Decoder(list[StoredTurn]).decode


class Stored:
    """The stored responses that a body refers to.

    Args:
        data: a JSON list of `StoredTurn`; empty if there are none.
    """

    def __init__(self, data: bytes) -> None:
        turns = _decode(data) if data else []
        self._turns = {turn.response.id: turn for turn in turns}

    def history(self, response_id: str | None) -> list[Item]:
        """Return all items up to a response, the earliest first."""
        turns: list[StoredTurn] = []
        while response_id is not None:
            turns.append(self._turns[response_id])
            response_id = turns[-1].response.previous_response_id
        return [
            item
            for turn in reversed(turns)
            for item in self._items(turn.input + turn.response.output)
        ]

    def items(self) -> Mapping[str, Item]:
        """Return all stored items; key the id."""
        return {
            str(raw["id"]): item
            for turn in self._turns.values()
            for raw in turn.input + turn.response.output
            for item in self._items([raw])
        }

    @staticmethod
    def _items(raw: list[dict[str, object]]) -> Iterator[Item]:
        for item in read_items(raw):
            assert not isinstance(item, ItemReference), "which is not stored"
            yield item
