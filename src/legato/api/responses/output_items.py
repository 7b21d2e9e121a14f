"""Turns the deltas of a message into a response's items and their events."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from msgspec import UNSET

from legato.api.http.bodies import TypedEvent
from legato.api.openai.logprobs import TokenLogprob
from legato.api.responses.response_events import (
    ArgumentsDelta,
    ArgumentsDone,
    InputDelta,
    InputDone,
    ItemAdded,
    ItemDone,
    OutputCustomToolCall,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ReasoningText,
    Status,
    TextDelta,
    TextDone,
)
from legato.api.responses.response_tools import CalledTool
from legato.language.message.message import MessageDelta, TextSpan, ToolCallDelta
from legato.language.message.tools import CUSTOM_INPUT

_PART = 0
"""Index of an item's only part."""

_BEGIN = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_WHOLE = re.compile(
    r"""(?: [^"\\]                                                  # a character
          | \\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}  # a pair of surrogates
          | \\u(?![dD][89abAB])[0-9a-fA-F]{4}                       # any other code unit
          | \\u[dD][89abAB][0-9a-fA-F]{2}                          # a surrogate without a partner
            (?= [^\\] | \\[^u] | \\u(?![dD][c-fC-F])[0-9a-fA-F]{2} )
          | \\[^u]                                                  # a short escape
        )*""",
    re.VERBOSE | re.DOTALL,
)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class OutputItems:
    """Builds a response's output item by item, from its deltas.

    Attributes:
        done: the complete items.

    Args:
        suffix: common to the items' ids, between a prefix for the type and the item's index.
        renamed_tools: as of `ResponseTerms`.
    """

    def __init__(self, suffix: str, renamed_tools: Mapping[str, CalledTool]) -> None:
        self.done: list[OutputItem] = []
        self._renamed_tools = renamed_tools
        self._suffix = suffix
        self._open: _OpenItem | None = None

    def take(
        self, delta: MessageDelta, logprobs: Callable[[TextSpan], Sequence[TokenLogprob]]
    ) -> list[TypedEvent]:
        """Return the events that a delta causes. Args: logprobs: returns those of content."""
        events: list[TypedEvent] = []
        for part in delta.parts:
            if isinstance(part, ToolCallDelta):
                if part.name is not None:
                    self._begin(self._called(part, part.name), events)
                if part.arguments:
                    events += self._open_item.add(part.arguments)
            elif part.is_reasoning:
                if not isinstance(self._open, _Reasoning):
                    self._begin(_Reasoning(*self._place("rs")), events)
                events += self._open_item.add(part.text)
            else:
                if not isinstance(self._open, _Message):
                    self._begin(_Message(*self._place("msg")), events)
                assert isinstance(self._open, _Message)
                events += self._open.add(part.text, logprobs(part))
        return events

    def close(self, status: Status) -> list[TypedEvent]:
        """End the open item. Args: status: of the last item; those before it are complete."""
        events: list[TypedEvent] = []
        if self._open is None and not self.done:
            # Clients expect a message even in an empty answer.
            self._begin(_Message(*self._place("msg")), events)
        if self._open is not None:
            self._end(status, events)
        return events

    def _called(self, call: ToolCallDelta, name: str) -> "_OpenItem":
        """Return a new item for a call. Args: call: its first delta."""
        tool = self._renamed_tools.get(name)
        if tool is not None and tool.is_custom:
            return _CustomToolCall(*self._place("ctc"), call, tool)
        tool = tool or CalledTool(name=name, namespace=None, is_custom=False)
        return _FunctionCall(*self._place("fc"), call, tool)

    def _place(self, prefix: str) -> tuple[str, int]:
        """Return the id and index of the next item."""
        index = len(self.done) + (self._open is not None)
        return f"{prefix}_{self._suffix}_{index}", index

    def _begin(self, item: "_OpenItem", events: list[TypedEvent]) -> None:
        if self._open is not None:
            self._end("completed", events)
        self._open = item
        events += item.begin()

    def _end(self, status: Status, events: list[TypedEvent]) -> None:
        item = self._open_item.item(status)
        events += self._open_item.end(item)
        self.done.append(item)
        self._open = None

    @property
    def _open_item(self) -> "_OpenItem":
        assert self._open is not None
        return self._open


class _OpenItem(ABC):
    """An incomplete item."""

    def __init__(self, item_id: str, index: int) -> None:
        self._id = item_id
        self._index = index
        self._texts: list[str] = []

    @abstractmethod
    def begin(self) -> list[TypedEvent]: ...

    @abstractmethod
    def add(self, text: str) -> list[TypedEvent]: ...

    @abstractmethod
    def item(self, status: Status) -> OutputItem:
        """Return the item so far."""

    @abstractmethod
    def end(self, item: OutputItem) -> list[TypedEvent]:
        """Return the last events of the finished item."""


class _Message(_OpenItem):
    def __init__(self, item_id: str, index: int) -> None:
        super().__init__(item_id, index)
        self._logprobs: list[TokenLogprob] = []

    def begin(self) -> list[TypedEvent]:
        empty = OutputMessage(self._id, "in_progress", [])
        return [
            ItemAdded(self._index, empty),
            PartAdded(self._id, self._index, _PART, OutputText("")),
        ]

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> list[TypedEvent]:
        self._texts.append(text)
        self._logprobs += logprobs
        return [TextDelta(self._id, self._index, _PART, text, list(logprobs))]

    def item(self, status: Status) -> OutputItem:
        part = OutputText("".join(self._texts), logprobs=self._logprobs)
        return OutputMessage(self._id, status, [part])

    def end(self, item: OutputItem) -> list[TypedEvent]:
        assert isinstance(item, OutputMessage)
        [part] = item.content
        return [
            TextDone(self._id, self._index, _PART, part.text, part.logprobs),
            PartDone(self._id, self._index, _PART, part),
            ItemDone(self._index, item),
        ]


class _Reasoning(_OpenItem):
    def begin(self) -> list[TypedEvent]:
        empty = OutputReasoning(self._id, "in_progress", [])
        return [
            ItemAdded(self._index, empty),
            PartAdded(self._id, self._index, _PART, ReasoningText("")),
        ]

    def add(self, text: str) -> list[TypedEvent]:
        self._texts.append(text)
        return [ReasoningDelta(self._id, self._index, _PART, text)]

    def item(self, status: Status) -> OutputItem:
        return OutputReasoning(self._id, status, [ReasoningText("".join(self._texts))])

    def end(self, item: OutputItem) -> list[TypedEvent]:
        assert isinstance(item, OutputReasoning)
        [part] = item.content
        return [
            ReasoningDone(self._id, self._index, _PART, part.text),
            PartDone(self._id, self._index, _PART, part),
            ItemDone(self._index, item),
        ]


class _FunctionCall(_OpenItem):
    def __init__(self, item_id: str, index: int, call: ToolCallDelta, tool: CalledTool) -> None:
        super().__init__(item_id, index)
        self._call_id = call.id or item_id
        self._tool = tool

    def begin(self) -> list[TypedEvent]:
        return [ItemAdded(self._index, self.item("in_progress"))]

    def add(self, text: str) -> list[TypedEvent]:
        self._texts.append(text)
        return [ArgumentsDelta(self._id, self._index, text)]

    def item(self, status: Status) -> OutputItem:
        return self._call(OutputFunctionCall, status)

    def end(self, item: OutputItem) -> list[TypedEvent]:
        assert isinstance(item, OutputFunctionCall)
        return [
            ArgumentsDone(self._id, self._index, self._tool.name, item.arguments),
            ItemDone(self._index, item),
        ]

    def _call(
        self, kind: type[OutputFunctionCall | OutputCustomToolCall], status: Status
    ) -> OutputItem:
        name, namespace = self._tool.name, self._tool.namespace or UNSET
        return kind(self._id, status, self._call_id, name, "".join(self._texts), namespace)


class _CustomToolCall(_FunctionCall):
    """Its function's only argument is the input."""

    @cached_property
    def _reader(self) -> "CustomInput":
        return CustomInput()

    def add(self, text: str) -> list[TypedEvent]:
        piece = self._reader.feed(text)
        self._texts.append(piece)
        return [InputDelta(self._id, self._index, piece)] if piece else []

    def item(self, status: Status) -> OutputItem:
        return self._call(OutputCustomToolCall, status)

    def end(self, item: OutputItem) -> list[TypedEvent]:
        assert isinstance(item, OutputCustomToolCall)
        return [InputDone(self._id, self._index, item.input), ItemDone(self._index, item)]


class CustomInput:
    """Reads `{"input": "..."}` piece by piece; the result does not depend on the pieces.

    A grammar holds the arguments to that form (`CustomTool.described`).
    """

    def __init__(self) -> None:
        self._unread = ""
        self._has_begun = False

    def feed(self, arguments: str) -> str:
        """Return the input's next characters. Args: arguments: the next piece of the JSON text."""
        self._unread += arguments
        if not self._has_begun:
            begin = _BEGIN.match(self._unread)
            if begin is None:
                return ""
            self._has_begun = True
            self._unread = self._unread[begin.end() :]
        found = _WHOLE.match(self._unread)
        assert found is not None, "it matches the empty text"
        self._unread = self._unread[found.end() :]
        text: str = json.loads(f'"{found[0]}"', strict=False)
        return _LONE_SURROGATE.sub("\ufffd", text)
