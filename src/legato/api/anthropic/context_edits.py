"""Anthropic's context edits: what is cleared from a long conversation before the model reads it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Field, Tag, WithJsonSchema, model_validator

from legato.api.anthropic.input_blocks import (
    AnthropicMessage,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from legato.api.bodies.body_model import AtMost, Name, PartError, RequestModel, by_type
from legato.api.limits import MAX_TOOLS

_CLEARED = "[This result was cleared to shorten the conversation.]"
_MAX_EDITS = 2
"""Each kind once: an edit costs up to two tokenizations of the prompt."""

_Amount = Annotated[int, Field(ge=0)]
CountTokens = Callable[[Sequence[AnthropicMessage]], int]
"""Returns the tokens of the prompt with these messages."""


class ClearedThinking(msgspec.Struct, frozen=True, tag_field="type", tag="clear_thinking_20251015"):
    """What an edit has cleared."""

    cleared_thinking_turns: int
    cleared_input_tokens: int


class ClearedToolUses(
    msgspec.Struct, frozen=True, tag_field="type", tag="clear_tool_uses_20250919"
):
    """What an edit has cleared."""

    cleared_tool_uses: int
    cleared_input_tokens: int


AppliedEdit = ClearedThinking | ClearedToolUses


class KeptThinking(RequestModel):
    """Attributes: `value` is a number of turns, and goes with `thinking_turns` only."""

    type: Literal["thinking_turns", "all"]
    value: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _check_value(self) -> "KeptThinking":
        if (self.type == "thinking_turns") != (self.value is not None):
            raise PartError('goes with "type": "thinking_turns", which needs it', "value")
        return self


def _as_kept(value: Any) -> Any:
    return {"type": value} if value == "all" else value


class ClearThinking(RequestModel):
    """Clears the thinking of all but the most recent turns."""

    type: Literal["clear_thinking_20251015"]
    """Clear the thinking of old turns."""
    keep: Annotated[
        KeptThinking,
        BeforeValidator(_as_kept),
        WithJsonSchema({"anyOf": [{"const": "all"}, {"type": "object"}]}),
    ] = KeptThinking(type="thinking_turns", value=1)
    """Recent turns that keep theirs, as `{"type": "thinking_turns", "value": 1}`, or `"all"`."""

    def cleared(self, messages: Sequence[AnthropicMessage]) -> tuple[list[AnthropicMessage], int]:
        """Return the messages that are left, and the number of turns whose thinking is gone."""
        turns = _turns(messages)
        thinking = sorted(
            {t for t, message in zip(turns, messages, strict=True) if _thinks(message)}
        )
        gone = set() if self.keep.value is None else set(thinking[: -self.keep.value])
        left = [
            _without_thinking(message) if turn in gone else message
            for turn, message in zip(turns, messages, strict=True)
        ]
        return left, len(gone)

    def is_due(self, _messages: Sequence[AnthropicMessage], _count: CountTokens) -> bool:
        return True

    @property
    def least_tokens(self) -> int:
        """The fewest tokens that are worth an edit."""
        return 0

    def applied(self, num_turns: int, num_tokens: int) -> ClearedThinking:
        return ClearedThinking(num_turns, num_tokens)


class Trigger(RequestModel):
    type: Literal["input_tokens", "tool_uses"]
    """Tokens of the prompt, or tool uses."""
    value: _Amount
    """Number of either."""


class KeptToolUses(RequestModel):
    type: Literal["tool_uses"]
    """Tool uses."""
    value: _Amount
    """Number of uses."""


class InputTokens(RequestModel):
    type: Literal["input_tokens"]
    """Tokens of the prompt."""
    value: _Amount
    """Number of tokens."""


_ToolNames = Annotated[list[Name], Field(fail_fast=True), AtMost(MAX_TOOLS)]


class ClearToolUses(RequestModel):
    """Replaces old results of tools by a short text, once the conversation is long."""

    type: Literal["clear_tool_uses_20250919"]
    """Replace old results of tools by a short text."""
    trigger: Trigger = Trigger(type="input_tokens", value=100_000)
    """Apply to conversations longer than this."""
    keep: KeptToolUses = KeptToolUses(type="tool_uses", value=3)
    """Recent tool uses to keep."""
    clear_at_least: InputTokens | None = None
    """Apply only if this many tokens are cleared."""
    exclude_tools: _ToolNames = Field(default_factory=list)
    """Tools whose uses stay."""
    clear_tool_inputs: bool | _ToolNames = False
    """Clear the inputs of calls as well; a list names the tools."""

    def cleared(self, messages: Sequence[AnthropicMessage]) -> tuple[list[AnthropicMessage], int]:
        """Return the messages that are left, and the number of tool uses that are cleared."""
        uses = list(_uses(messages))
        old = uses[: len(uses) - self.keep.value] if self.keep.value < len(uses) else []
        names = {use.id: use.name for use in old if use.name not in self.exclude_tools}
        left = [self._without(names, message) for message in messages]
        return left, len(names)

    def is_due(self, messages: Sequence[AnthropicMessage], count: CountTokens) -> bool:
        """Whether a conversation is long enough for the edit."""
        if self.trigger.type == "tool_uses":
            return sum(1 for _ in _uses(messages)) > self.trigger.value
        return count(messages) > self.trigger.value

    @property
    def least_tokens(self) -> int:
        """The fewest tokens that are worth an edit."""
        return self.clear_at_least.value if self.clear_at_least else 0

    def applied(self, num_uses: int, num_tokens: int) -> ClearedToolUses:
        return ClearedToolUses(num_uses, num_tokens)

    def _without(self, names: dict[str, str], message: AnthropicMessage) -> AnthropicMessage:
        """Args: names: of the tools whose uses are cleared; key the use's id."""
        content = [self._block_without(names, block) for block in message.content]
        return message.model_copy(update={"content": content})

    def _block_without(self, names: dict[str, str], block: Any) -> Any:
        if isinstance(block, ToolResultBlock) and block.tool_use_id in names:
            cleared = [TextBlock(type="text", text=_CLEARED)]
            return block.model_copy(update={"content": cleared})
        if isinstance(block, ToolUseBlock) and block.id in names and self._clears_input(block.name):
            return block.model_copy(update={"input": {}})
        return block

    def _clears_input(self, name: str) -> bool:
        cleared = self.clear_tool_inputs
        return cleared if isinstance(cleared, bool) else name in cleared


Edit = Annotated[
    Annotated[ClearThinking, Tag("<clear_thinking_20251015>")]
    | Annotated[ClearToolUses, Tag("<clear_tool_uses_20250919>")],
    *by_type("an edit", "clear_thinking_20251015", "clear_tool_uses_20250919"),
]


class ContextManagement(RequestModel):
    edits: Annotated[list[Edit], AtMost(_MAX_EDITS)] = Field(default_factory=list)
    """`clear_thinking_20251015` and `clear_tool_uses_20250919`, applied in order."""


def edited(
    messages: Sequence[AnthropicMessage], edits: Iterable[Edit], count: CountTokens
) -> tuple[Sequence[AnthropicMessage], list[AppliedEdit]]:
    """Apply edits one after the other; return the messages that are left, and what was cleared."""
    applied: list[AppliedEdit] = []
    for edit in edits:
        left, num_cleared = edit.cleared(messages)
        if not num_cleared or not edit.is_due(messages, count):
            continue
        num_tokens = count(messages) - count(left)
        if num_tokens >= edit.least_tokens:
            messages = left
            applied.append(edit.applied(num_cleared, num_tokens))
    return messages, applied


def _turns(messages: Iterable[AnthropicMessage]) -> list[int]:
    """Number the turns: a user's message that has no result of a tool begins another."""
    turns, turn = [], 0
    for message in messages:
        has_result = any(isinstance(block, ToolResultBlock) for block in message.content)
        turn += message.role == "user" and not has_result
        turns.append(turn)
    return turns


def _thinks(message: AnthropicMessage) -> bool:
    return any(_is_thinking(block) for block in message.content)


def _is_thinking(block: Any) -> bool:
    return isinstance(block, ThinkingBlock | RedactedThinkingBlock)


def _without_thinking(message: AnthropicMessage) -> AnthropicMessage:
    content = [block for block in message.content if not _is_thinking(block)]
    return message.model_copy(update={"content": content})


def _uses(messages: Iterable[AnthropicMessage]) -> Iterable[ToolUseBlock]:
    for message in messages:
        yield from (block for block in message.content if isinstance(block, ToolUseBlock))
