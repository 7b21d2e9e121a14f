"""Anthropic's messages and their content blocks, converted to the messages of a chat."""

import base64
import binascii
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, WithJsonSchema

from legato.api.bodies.body_model import (
    AtMost,
    LenientModel,
    Name,
    OrText,
    RequestModel,
    by_type,
    only,
)
from legato.api.bodies.chat_messages import json_text
from legato.api.limits import MAX_CONTENT_PARTS

_SIGNED = "legato."


def signature(thinking: str) -> str:
    """Return the signature of a block whose text is omitted, from which the text can be read."""
    return _SIGNED + base64.b64encode(thinking.encode()).decode()


def _unsigned(signature: str) -> str:
    """Return the text of a signature; empty if it is another server's."""
    if not signature.startswith(_SIGNED):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_SIGNED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _as_blocks(text: str) -> list[Any]:
    return [{"type": "text", "text": text}]


class TextBlock(LenientModel):
    type: Annotated[str, only("text")]
    """Other blocks are for messages."""
    text: str
    """Texts are joined by line ends."""


Texts = Annotated[
    list[TextBlock], Field(fail_fast=True), AtMost(MAX_CONTENT_PARTS), OrText(_as_blocks)
]


class ToolReferenceBlock(LenientModel):
    """Of a tool that a search has found, which the model knows from then on."""

    type: Literal["tool_reference"]
    tool_name: Name

    @property
    def text(self) -> str:
        return self.tool_name


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ToolReferenceBlock, Tag("<tool_reference>")],
    *by_type("a block of a tool's result", "text", "tool_reference"),
]


class ToolUseBlock(LenientModel):
    """Attributes: `input` is an object, or what else a model wrote in its place."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: Annotated[Any, WithJsonSchema({"type": "object"})] = Field(default_factory=dict)


class ToolResultBlock(LenientModel):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: Annotated[
        list[ResultBlock], Field(fail_fast=True), AtMost(MAX_CONTENT_PARTS), OrText(_as_blocks)
    ] = Field(default_factory=list)
    is_error: bool = False


class ThinkingBlock(LenientModel):
    """Attributes: `signature` has the text if the server was asked to omit it."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""

    @property
    def text(self) -> str:
        return self.thinking or _unsigned(self.signature)


class RedactedThinkingBlock(LenientModel):
    """Encrypted, so it is left out of the prompt."""

    type: Literal["redacted_thinking"]


class ServerToolBlock(LenientModel):
    """A search for tools by Anthropic's servers; it is left out of the prompt."""

    type: Literal["server_tool_use", "tool_search_tool_result"]


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ServerToolBlock, Tag("<server_tool>")],
    *by_type(
        "a block",
        *("text", "tool_use", "tool_result", "thinking", "redacted_thinking"),
        server_tool_use="server_tool",
        tool_search_tool_result="server_tool",
    ),
]


class AnthropicMessage(RequestModel):
    role: Literal["user", "assistant", "system"]
    """The speaker."""
    content: Annotated[
        list[Block], Field(fail_fast=True), AtMost(MAX_CONTENT_PARTS), OrText(_as_blocks)
    ]
    """Text, or blocks: `text`, `tool_use`, `tool_result`, `thinking`."""


def assistant_message(blocks: list[Any]) -> dict[str, Any]:
    """Convert an assistant's blocks to a chat message."""
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.text for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": joined_text(texts) if texts else None,
    }
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    elif not texts:
        message["content"] = ""
    return message


def said_messages(message: AnthropicMessage) -> Iterator[dict[str, Any]]:
    """Yield the message's tool results and the texts between them, each as a chat message."""
    texts: list[TextBlock] = []
    for block in message.content:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResultBlock):
            if texts:
                yield {"role": message.role, "content": joined_text(texts)}
                texts = []
            yield {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "content": joined_text(block.content),
            }
    if texts or not message.content:
        yield {"role": message.role, "content": joined_text(texts)}


def referred_tools(messages: Iterable[AnthropicMessage]) -> Iterator[str]:
    """Yield the names of the tools that results of tools refer to."""
    for message in messages:
        for block in message.content:
            if isinstance(block, ToolResultBlock):
                for part in block.content:
                    if isinstance(part, ToolReferenceBlock):
                        yield part.tool_name


def joined_text(blocks: Iterable[TextBlock | ToolReferenceBlock]) -> str:
    """Join texts, each on a line of its own."""
    return "\n".join(block.text for block in blocks)


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json_text(block.input)}
    return {"id": block.id, "type": "function", "function": function}
