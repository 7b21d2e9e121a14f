"""The bodies of POST /v1/messages and /v1/messages/count_tokens, converted to chats."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, Tag

from legato.core.sampling_params import MAX_STOP
from legato.server.limits import MAX_CONTENT_PARTS, MAX_MESSAGES, MAX_TOOLS
from legato.server.requests.chat_body import ChatBody
from legato.server.requests.generation import GenerationOptions
from legato.server.requests.request_model import (
    AtMost,
    LenientModel,
    ModelRequest,
    Name,
    OrText,
    RequestModel,
    by_type,
    only,
)
from legato.server.requests.tools import described_tool, named_tool


def _as_blocks(text: str) -> list[Any]:
    return [{"type": "text", "text": text}]


class TextBlock(LenientModel):
    type: Annotated[str, only("text")]
    text: str


Texts = Annotated[
    list[TextBlock],
    Field(fail_fast=True),
    AtMost(MAX_CONTENT_PARTS),
    OrText(_as_blocks),
]


class ToolUseBlock(LenientModel):
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


class ToolResultBlock(LenientModel):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: Texts = Field(default_factory=list)
    is_error: bool = False


class ThinkingBlock(LenientModel):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(LenientModel):
    """Encrypted, so it is left out of the prompt."""

    type: Literal["redacted_thinking"]


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")],
    *by_type("a block", "text", "tool_use", "tool_result", "thinking", "redacted_thinking"),
]


class AnthropicMessage(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Block],
        Field(fail_fast=True),
        AtMost(MAX_CONTENT_PARTS),
        OrText(_as_blocks),
    ]


class AnthropicTool(RequestModel):
    """A function that the model may call."""

    type: Annotated[str, only("custom")] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: Annotated[bool, only(False)] | None = None
    allowed_callers: Annotated[list[str], only(["direct"]), AtMost(1)] | None = None
    # Hints; they change nothing.
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None


class AnthropicToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False

    def chat(self) -> Any:
        """Return the `tool_choice` of a chat."""
        if self.type == "tool":
            return named_tool(self.name)
        return "required" if self.type == "any" else self.type


class Thinking(RequestModel):
    """Attributes: `budget_tokens` is a hint; `max_tokens` bounds thinking and answer together."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Annotated[str, only("summarized")] | None = None


class OutputFormat(RequestModel):
    type: Annotated[str, only("json_schema")]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]

    def chat(self) -> dict[str, Any]:
        """Return the `response_format` of a chat."""
        schema = {"name": "output", "schema": self.schema_, "strict": True}
        return {"type": self.type, "json_schema": schema}


class OutputConfig(RequestModel):
    effort: Name | None = None
    format: OutputFormat | None = None


class AnthropicMetadata(RequestModel):
    user_id: Name | None = None


class CountTokensRequest(ModelRequest):
    """A conversation whose prompt is counted."""

    messages: Annotated[
        list[AnthropicMessage], Field(min_length=1, fail_fast=True), AtMost(MAX_MESSAGES)
    ]
    system: Texts | None = None
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True), AtMost(MAX_TOOLS)] = Field(
        default_factory=list
    )
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # Hints, and values that change nothing.
    cache_control: dict[str, Any] | None = None
    speed: Annotated[str, only("standard")] | None = None

    def chat(self) -> ChatBody:
        """Convert the request to a chat."""
        messages = list(self._chat_messages())
        fields = {"messages": [message for _, message in messages], **self._tool_fields()}
        last = messages[-1][1] if messages else {}
        if last.get("role") == "assistant" and "tool_calls" not in last:
            # The beginning of the assistant's answer.
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.thinking is not None and self.thinking.type in ("enabled", "disabled"):
            switch = self.thinking.type == "enabled"
            fields["chat_template_kwargs"] = {"enable_thinking": switch}
        if self.output_config is not None:
            config = self.output_config
            fields["reasoning_effort"] = config.effort
            fields["response_format"] = config.format and config.format.chat()
        return ChatBody(fields, [place for place, _ in messages], _NAMES)

    def _chat_messages(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the chat's messages, each with the client's name for it."""
        if self.system:
            yield "system", {"role": "system", "content": _text(self.system)}
        for i, message in enumerate(self.messages):
            if message.role == "assistant":
                yield f"messages.{i}", _assistant_message(message.content)
            else:
                for said in _said(message):
                    yield f"messages.{i}", said

    def _tool_fields(self) -> dict[str, Any]:
        if not self.tools:
            return {}
        choice = self.tool_choice or AnthropicToolChoice(type="auto")
        return {
            "tools": [
                described_tool(tool.name, tool.input_schema, tool.description, strict=tool.strict)
                for tool in self.tools
            ],
            "tool_choice": choice.chat(),
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
        }


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


class MessagesRequest(CountTokensRequest, GenerationOptions):
    """A turn of a conversation."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[
        list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True), AtMost(MAX_STOP)
    ] = Field(default_factory=list)
    metadata: AnthropicMetadata | None = None
    service_tier: Annotated[str, only("auto", "standard_only")] | None = None

    def chat(self) -> ChatBody:
        body = super().chat()
        body.fields["max_tokens"] = self.max_tokens
        body.fields["stop"] = self.stop_sequences
        return body


_NAMES = {
    "messages": "messages",
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs": "thinking",
    "tools.*.function": "tools.*",
    "tools.*.function.parameters": "tools.*.input_schema",
}
"""Key the path of a chat's field, value its path in this API; `*` stands for an index."""


def _assistant_message(blocks: list[Any]) -> dict[str, Any]:
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    message: dict[str, Any] = {"role": "assistant", "content": _text(texts) if texts else None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    elif not texts:
        message["content"] = ""
    return message


def _said(message: AnthropicMessage) -> Iterator[dict[str, Any]]:
    """Yield the message's tool results and the texts between them, each as a chat message."""
    texts: list[TextBlock] = []
    for block in message.content:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResultBlock):
            if texts:
                yield {"role": message.role, "content": _text(texts)}
                texts = []
            yield {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "content": _text(block.content),
            }
    if texts or not message.content:
        yield {"role": message.role, "content": _text(texts)}


def _text(blocks: list[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}
