"""Messages of a conversation, and how they become a prompt."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from legato.core.errors import InvalidRequestError
from legato.server.limits import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_TEMPLATE_CHARS,
    MAX_TEMPLATE_VARIABLES,
)
from legato.server.requests.request_model import AtMost, Name, RequestModel

# Arguments of the template renderer that are not for the template.
_RESERVED = ("self", "messages", "chat_template", "add_generation_prompt", "continue_final_message")

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_TEXT_PARTS = {"type": "array", "items": _TEXT_PART, "maxItems": MAX_CONTENT_PARTS}


def _joined_text(value: Any) -> Any:
    """One text from a message's parts, which stand on lines of their own."""
    if not isinstance(value, list):
        return value
    if len(value) > MAX_CONTENT_PARTS:
        raise ValueError(f"has {len(value)} parts, over {MAX_CONTENT_PARTS}")
    return "\n".join(map(_part_text, value))


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ValueError(
            f"a content part of type {kind!r} is not supported; parts are "
            '{"type": "text", "text": "..."}'
        )
    text: str = part["text"]
    return text


MessageText = Annotated[
    str,
    BeforeValidator(_joined_text),
    WithJsonSchema({"anyOf": [{"type": "string"}, _TEXT_PARTS]}),
]


class ChatMessage(RequestModel):
    """One message; what is set goes to the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: MessageText
    name: Name | None = None
    tool_call_id: Name | None = None


Messages = Annotated[list[ChatMessage], Field(fail_fast=True), AtMost(MAX_MESSAGES)]


class TemplateOptions(RequestModel):
    """How messages become a prompt."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: Annotated[str, AtMost(MAX_TEMPLATE_CHARS)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AtMost(MAX_TEMPLATE_VARIABLES)] | None = None

    @model_validator(mode="after")
    def _check_template_options(self) -> "TemplateOptions":
        for name in _RESERVED:
            if name in (self.chat_template_kwargs or {}):
                raise InvalidRequestError(
                    f"chat_template_kwargs must not contain {name}", param="chat_template_kwargs"
                )
        return self
