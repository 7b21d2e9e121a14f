"""Messages of a conversation, and how they become a prompt."""

import json
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from legato.api.bodies.body_model import (
    AtMost,
    LenientModel,
    Name,
    PartError,
    RequestModel,
    only,
    set_fields,
)
from legato.api.bodies.chat_tools import Tools
from legato.api.limits import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_ROLE_CHARS,
    MAX_TEMPLATE_CHARS,
    MAX_TEMPLATE_VARIABLES,
    MAX_TOOL_CALLS,
)
from legato.core.errors import InvalidRequestError
from legato.language.conversation.rewrite import arguments_object, why_not_read
from legato.language.conversation.template import ConversationOptions

# Arguments of the renderer itself, which requests must not set.
_RESERVED = frozenset(
    {
        *("self", "messages", "tools", "chat_template"),
        *("add_generation_prompt", "continue_final_message"),
    }
)

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT = {"type": "array", "items": _TEXT_PART, "maxItems": MAX_CONTENT_PARTS}
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Key the type of a content part, value the field that has its text."""
_MEDIA = ("audio", "images", "videos")


def _joined_text(value: Any) -> Any:
    """Join the texts of a message's parts, each on a line of its own."""
    if not isinstance(value, list):
        return value
    if len(value) > MAX_CONTENT_PARTS:
        raise ValueError(f"has {len(value)} parts, over {MAX_CONTENT_PARTS}")
    return "\n".join(_part_text(i, part) for i, part in enumerate(value))


def _part_text(index: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(TEXT_PARTS.get(kind)) if isinstance(kind, str) else None
    if not isinstance(text, str):
        raise PartError(
            f"a content part of type {kind!r} is not supported{why_not_read(kind)}; parts are "
            '{"type": "text", "text": "..."}',
            index,
        )
    return text


MessageText = Annotated[
    str, BeforeValidator(_joined_text), WithJsonSchema({"anyOf": [{"type": "string"}, _CONTENT]})
]


def json_text(value: Any) -> str:
    """Return a text as it is, and other JSON as text."""
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidRequestError("arguments are nested too deeply", param="messages") from error


CallArguments = Annotated[
    str,
    BeforeValidator(json_text),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]}),
]
"""The arguments of a past call, as the model wrote them: a JSON text, valid or not, or JSON."""


class CalledFunction(LenientModel):
    name: Name
    """The function's name."""
    arguments: CallArguments = "{}"
    """JSON text, or an object."""

    def for_template(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": arguments_object(self.arguments)}


class MessageToolCall(LenientModel):
    id: Name = ""
    """The call's id."""
    type: Annotated[str, only("function")] = "function"
    """Only functions are supported."""
    function: CalledFunction
    """The call."""


class ChatMessage(LenientModel):
    """One message. Clients' histories have keys of their own, which are ignored."""

    role: Annotated[str, Field(min_length=1), AtMost(MAX_ROLE_CHARS)]
    """The speaker: OpenAI's roles, and those of the chat template."""
    content: MessageText = ""
    """Text, or parts `{"type": "text", "text": "..."}`."""
    name: Name | None = None
    """For the chat template."""
    tool_call_id: Name | None = None
    """The call that a `tool` message answers."""
    tool_calls: (
        Annotated[list[MessageToolCall], Field(fail_fast=True), AtMost(MAX_TOOL_CALLS)] | None
    ) = None
    """Calls of an earlier answer."""
    function_call: CalledFunction | None = None
    """Old form of a call."""
    reasoning_content: str | None = None
    """Reasoning of an earlier answer."""
    reasoning: str | None = None
    """vLLM's name of `reasoning_content`."""
    refusal: str | None = None
    """Replaces an empty `content`."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_media(cls, data: Any) -> Any:
        for name in _MEDIA:
            if isinstance(data, dict) and data.get(name):
                raise PartError(f"is not supported{why_not_read(name)}", name)
        return data

    @model_validator(mode="after")
    def _check_content(self) -> "ChatMessage":
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise PartError("content is missing", "content")
        return self

    @property
    def text(self) -> str:
        return self.content or self.refusal or ""

    @property
    def thought(self) -> str | None:
        return self.reasoning_content or self.reasoning

    def for_template(self) -> dict[str, Any]:
        """Convert to the format of transformers' chat templates."""
        is_function = self.role == "function"  # OpenAI's older name of the role "tool"
        message: dict[str, Any] = {"role": "tool" if is_function else self.role}
        message["content"] = self.text
        if self.thought and self.role == "assistant":
            message["reasoning_content"] = self.thought
        calls = [
            {"id": call.id, "type": call.type, "function": call.function.for_template()}
            for call in self.tool_calls or ()
        ]
        if self.function_call is not None:
            calls.append({"type": "function", "function": self.function_call.for_template()})
        if calls and self.role == "assistant":
            message["tool_calls"] = calls
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        return message


Messages = Annotated[list[ChatMessage], Field(fail_fast=True), AtMost(MAX_MESSAGES)]


class TemplateOptions(RequestModel):
    """Options for rendering messages to a prompt."""

    tools: Tools | None = None
    """[Functions](../guides/tools.md) that the model may call."""
    add_generation_prompt: bool = True
    """End the prompt with the beginning of an answer."""
    continue_final_message: bool = False
    """Continue the last message instead of answering it."""
    chat_template: Annotated[str, AtMost(MAX_TEMPLATE_CHARS)] | None = None
    """Template in Jinja; needs `--trust-request-chat-template`."""
    chat_template_kwargs: Annotated[dict[str, Any], AtMost(MAX_TEMPLATE_VARIABLES)] | None = None
    """Variables of the chat template."""
    enable_thinking: bool | None = None
    """Shorthand for this variable of the template."""
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None
    """Most tokens of thinking; 0 for none, -1 for no limit. At it, the answer begins."""
    thinking_budget: Annotated[int, Field(ge=-1)] | None = None
    """Other name of `thinking_token_budget` (Qwen, SGLang)."""

    @model_validator(mode="after")
    def _take_thinking_budget(self) -> "TemplateOptions":
        set_fields(self, "thinking_budget", thinking_token_budget=self.thinking_budget)
        return self

    @model_validator(mode="after")
    def _check_template_options(self) -> "TemplateOptions":
        for name in _RESERVED.intersection(self.chat_template_kwargs or {}):
            raise InvalidRequestError(
                f"chat_template_kwargs must not contain {name}", param="chat_template_kwargs"
            )
        return self

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the template that the client has set."""
        switch = False if self.thinking_token_budget == 0 else self.enable_thinking
        variables = {} if switch is None else {"enable_thinking": switch}
        return {**variables, **(self.chat_template_kwargs or {})}

    @property
    def effort(self) -> str | None:
        """As of `ChatPrompts.make`."""
        return None

    @property
    def conversation_options(self) -> ConversationOptions:
        """The options in plain data."""
        return ConversationOptions(
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.template_variables,
        )
