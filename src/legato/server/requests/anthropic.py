"""The bodies of POST /v1/messages and /v1/messages/count_tokens, converted to chats."""

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from legato.core.errors import InvalidRequestError
from legato.core.sampling_params import MAX_STOP
from legato.server.limits import MAX_MESSAGES, MAX_TEMPLATE_VARIABLES, MAX_TOOLS
from legato.server.requests.anthropic_blocks import (
    AnthropicMessage,
    TextBlock,
    Texts,
    assistant_message,
    joined_text,
    said_messages,
)
from legato.server.requests.chat_body import ChatBody
from legato.server.requests.context_edits import AppliedEdit, ContextManagement, edited
from legato.server.requests.generation import GenerationOptions
from legato.server.requests.request_model import (
    AtMost,
    LenientModel,
    ModelRequest,
    Name,
    RequestModel,
    only,
)
from legato.server.requests.tools import described_tool, named_tool


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
    """How the model thinks.

    Attributes:
        budget_tokens: a hint; `max_tokens` bounds thinking and answer together.
        display: whether answers show the text of thinking; if not, it is in the signature.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


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


class AnthropicMetadata(LenientModel):
    """A client's notes on a request; its other fields change nothing, too."""

    user_id: Name | None = None


def _refused(_value: Any) -> Any:
    raise InvalidRequestError(
        "thread: this server holds no conversations; send the whole of it, without thread",
        param="thread",
        code="thread_unsupported_request",
    )


Thread = Annotated[
    dict[str, Any] | None, BeforeValidator(_refused), WithJsonSchema({"type": "null"})
]
"""A conversation that the server is to hold; clients go on without one after this error."""


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
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    thread: Thread = None
    chat_template_kwargs: Annotated[dict[str, Any], AtMost(MAX_TEMPLATE_VARIABLES)] | None = None
    # Hints, and values that change nothing.
    cache_control: dict[str, Any] | None = None
    speed: Annotated[str, only("standard")] | None = None

    @model_validator(mode="after")
    def _check_formats(self) -> "CountTokensRequest":
        if self.output_format and self.output_config and self.output_config.format:
            raise InvalidRequestError(
                "output_format is the old name of output_config.format; give one of them",
                param="output_format",
            )
        return self

    def edited(self, count: Callable[[ChatBody], int]) -> tuple[ChatBody, list[AppliedEdit]]:
        """Apply the context edits; return the chat, and what was cleared.

        Args:
            count: returns the tokens of a chat's prompt.
        """
        edits = self.context_management.edits if self.context_management else []
        messages, applied = edited(self.messages, edits, lambda left: count(self.chat(left)))
        return self.chat(messages), applied

    def chat(self, conversation: Sequence[AnthropicMessage]) -> ChatBody:
        """Convert the request to a chat, with these messages."""
        messages = list(self._chat_messages(conversation))
        fields = {"messages": [message for _, message in messages], **self._tool_fields()}
        last = messages[-1][1] if messages else {}
        if last.get("role") == "assistant" and "tool_calls" not in last:
            # The beginning of the assistant's answer.
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        fields["chat_template_kwargs"] = self.chat_template_kwargs
        if self.thinking is not None and self.thinking.type in ("enabled", "disabled"):
            fields["enable_thinking"] = self.thinking.type == "enabled"
        config = self.output_config or OutputConfig()
        fields["reasoning_effort"] = config.effort
        output = self.output_format or config.format
        fields["response_format"] = output and output.chat()
        return ChatBody(fields, [place for place, _ in messages], _NAMES)

    def _chat_messages(
        self, messages: Sequence[AnthropicMessage]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the chat's messages, each with the client's name for it."""
        if system := [block for block in self.system or () if not _is_billing(block)]:
            yield "system", {"role": "system", "content": joined_text(system)}
        for i, message in enumerate(messages):
            if message.role == "assistant":
                yield f"messages.{i}", assistant_message(message.content)
            else:
                for said in said_messages(message):
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


class TokensBeforeEdits(msgspec.Struct, frozen=True):
    original_input_tokens: int


class TokenCount(msgspec.Struct, frozen=True):
    """Attributes: `context_management` is present if the request has it."""

    input_tokens: int
    context_management: TokensBeforeEdits | UnsetType = UNSET


class MessagesRequest(CountTokensRequest, GenerationOptions):
    """A turn of a conversation."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[
        list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True), AtMost(MAX_STOP)
    ] = Field(default_factory=list)
    metadata: AnthropicMetadata | None = None
    service_tier: Annotated[str, only("auto", "standard_only")] | None = None

    @property
    def omits_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

    def chat(self, conversation: Sequence[AnthropicMessage]) -> ChatBody:
        body = super().chat(conversation)
        body.fields["max_tokens"] = self.max_tokens
        body.fields["stop"] = self.stop_sequences
        return body


def _is_billing(block: TextBlock) -> bool:
    """Whether a block is Claude Code's note for Anthropic's accounts, which differs by session.

    Left out, so that sessions share the beginning of their prompts in the cache.
    """
    return block.text.startswith("x-anthropic-billing-header:")


_NAMES = {
    "messages": "messages",
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "reasoning_effort": "output_config.effort",
    "tools.*.function": "tools.*",
    "tools.*.function.parameters": "tools.*.input_schema",
}
"""Key the path of a chat's field, value its path in this API; `*` stands for an index."""
