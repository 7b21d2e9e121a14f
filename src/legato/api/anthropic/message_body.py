"""The bodies of POST /v1/messages and /v1/messages/count_tokens: chats, and jobs made of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from legato.api.anthropic.context_edits import AppliedEdit, ContextManagement, edited
from legato.api.anthropic.input_blocks import (
    AnthropicMessage,
    TextBlock,
    Texts,
    assistant_message,
    joined_text,
    referred_tools,
    said_messages,
)
from legato.api.bodies.as_chat import ChatBody, left_out
from legato.api.bodies.body_model import (
    AtMost,
    BodyParser,
    LenientModel,
    ModelRequest,
    Name,
    PartError,
    RequestModel,
    only,
)
from legato.api.bodies.chat_tools import described_tool, named_tool
from legato.api.bodies.generation_options import GenerationOptions
from legato.api.job import End, Part, answered
from legato.api.limits import MAX_MESSAGES, MAX_TEMPLATE_VARIABLES, MAX_TOOLS
from legato.core.errors import InvalidRequestError
from legato.core.sampling_params import MAX_STOP

if TYPE_CHECKING:
    from legato.api.openai.chat_job import ChatJobs

_TOOL_SEARCH = tuple(
    f"tool_search_tool_{kind}{version}"
    for kind in ("regex", "bm25")
    for version in ("", "_20251119")
)


class AnthropicTool(RequestModel):
    """A function that the model may call, or Anthropic's search for deferred ones."""

    type: Annotated[str, only("custom", *_TOOL_SEARCH)] | None = None
    """Tools of Anthropic's servers are left out."""
    name: Name
    """The tool's name."""
    description: str | None = None
    """Shown to the model."""
    input_schema: dict[str, Any] | None = None
    """JSON schema of the input."""
    strict: bool | None = None
    """Hold every call to the schema."""
    defer_loading: bool = False
    """Show the tool once a result has a `tool_reference` to it."""
    allowed_callers: Annotated[list[str], only(["direct"]), AtMost(1)] | None = None
    """The model alone calls tools."""
    # Hints; they change nothing.
    cache_control: dict[str, Any] | None = None
    """Changes nothing: the cache is automatic."""
    eager_input_streaming: bool | None = None
    """Changes nothing: inputs are always streamed."""
    input_examples: list[dict[str, Any]] | None = None
    """Changes nothing: the model is not shown them."""

    @property
    def is_search(self) -> bool:
        return self.type in _TOOL_SEARCH

    @model_validator(mode="after")
    def _check_schema(self) -> "AnthropicTool":
        if self.input_schema is None and not self.is_search:
            raise PartError("is missing", "input_schema")
        return self


class AnthropicToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    """Whether the model may call any, must call any, or must call this one."""
    name: Name | None = None
    """The tool to call, with `tool`."""
    disable_parallel_tool_use: bool = False
    """Allow one call at a time."""

    @model_validator(mode="after")
    def _check_name(self) -> "AnthropicToolChoice":
        if (self.name is not None) != (self.type == "tool"):
            wrong = "is missing" if self.name is None else "goes with type: tool only"
            raise PartError(wrong, "name")
        return self

    def chat(self) -> Any:
        """Return the `tool_choice` of a chat."""
        if self.type == "tool":
            return named_tool(self.name)
        return "required" if self.type == "any" else self.type


class Thinking(RequestModel):
    """How the model thinks."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    """`adaptive` and `between_tools` leave it to the model."""
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of thinking; at it, the answer begins."""
    display: Literal["summarized", "omitted"] | None = None
    """`omitted` leaves thinking in `signature` alone."""


class OutputFormat(RequestModel):
    type: Annotated[str, only("json_schema")]
    """Only schemas are supported."""
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    """The JSON schema."""

    def chat(self) -> dict[str, Any]:
        """Return the `response_format` of a chat."""
        schema = {"name": "output", "schema": self.schema_, "strict": True}
        return {"type": self.type, "json_schema": schema}


class OutputConfig(RequestModel):
    effort: Name | None = None
    """As `reasoning_effort` of a chat."""
    format: OutputFormat | None = None
    """JSON by a schema."""


class AnthropicMetadata(LenientModel):
    """A client's notes on a request; its other fields change nothing, too."""

    user_id: Name | None = None
    """Changes nothing: the client's note."""


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
    """The conversation."""
    system: Texts | None = None
    """System message before all others."""
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True), AtMost(MAX_TOOLS)] = Field(
        default_factory=list
    )
    """Functions that the model may call."""
    tool_choice: AnthropicToolChoice | None = None
    """With `none`, tools do not count."""
    thinking: Thinking | None = None
    """Switch thinking on or off, if the chat template can."""
    output_config: OutputConfig | None = None
    """`effort` is `reasoning_effort` of a chat; `format` is the answer's."""
    output_format: OutputFormat | None = None
    """Changes nothing: the model is not shown the schema."""
    context_management: ContextManagement | None = None
    """What to clear from a long conversation."""
    thread: Thread = None
    """Refused: the server holds no conversations."""
    chat_template_kwargs: Annotated[dict[str, Any], AtMost(MAX_TEMPLATE_VARIABLES)] | None = None
    """Variables of the chat template."""
    # Hints, and values that change nothing.
    cache_control: dict[str, Any] | None = None
    """Changes nothing: the cache is automatic."""
    speed: Annotated[str, only("standard")] | None = None
    """There is one speed."""

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
        if self.context_management is None:
            return self.chat(self.messages), []
        edits = self.context_management.edits
        messages, applied = edited(self.messages, edits, lambda left: count(self.chat(left)))
        return self.chat(messages), applied

    def chat(self, conversation: Sequence[AnthropicMessage]) -> ChatBody:
        """Convert the request to a chat, with these messages."""
        messages = list(self._chat_messages(conversation))
        offered = self._offered_tools(conversation)
        fields = {"messages": [message for _, message in messages], **self._tool_fields(offered)}
        last = messages[-1][1] if messages else {}
        if last.get("role") == "assistant" and "tool_calls" not in last:
            # The beginning of the assistant's answer.
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        fields["chat_template_kwargs"] = self.chat_template_kwargs
        if self.thinking is not None:
            fields["thinking_token_budget"] = self.thinking.budget_tokens
            if self.thinking.type in ("enabled", "disabled"):
                fields["enable_thinking"] = self.thinking.type == "enabled"
        config = self.output_config or OutputConfig()
        fields["reasoning_effort"] = config.effort
        output = self.output_format or config.format
        fields["response_format"] = output and output.chat()
        names = dict(_NAMES)
        for k, i in enumerate(offered):
            names[f"tools.{k}.function"] = f"tools.{i}"
            names[f"tools.{k}.function.parameters"] = f"tools.{i}.input_schema"
        return ChatBody(fields, [place for place, _ in messages], names)

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

    @property
    def left_out_tools(self) -> list[str]:
        """Types of the tools that the model is not offered."""
        return [tool.type or "" for tool in self.tools if tool.is_search]

    def _offered_tools(self, conversation: Sequence[AnthropicMessage]) -> dict[int, AnthropicTool]:
        """Return the tools that the model knows; key the index.

        It knows a deferred tool if a tool's result refers to it. If Anthropic's servers are to
        search for tools, which this one does not, it knows all.

        Raises:
            InvalidRequestError: all tools are deferred.
        """
        known = set(referred_tools(conversation))
        if self.tool_choice is not None and self.tool_choice.name is not None:
            known.add(self.tool_choice.name)
        has_search = bool(self.left_out_tools)
        offered = {
            i: tool
            for i, tool in enumerate(self.tools)
            if not tool.is_search and (has_search or not tool.defer_loading or tool.name in known)
        }
        if self.tools and not has_search and all(tool.defer_loading for tool in self.tools):
            raise InvalidRequestError(
                "at least one tool must have defer_loading: false", param="tools"
            )
        return offered

    def _tool_fields(self, offered: Mapping[int, AnthropicTool]) -> dict[str, Any]:
        choice = self.tool_choice or AnthropicToolChoice(type="auto")
        return {
            "tools": [
                described_tool(tool.name, tool.input_schema, tool.description, strict=tool.strict)
                for tool in offered.values()
            ],
            "tool_choice": choice.chat(),
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
        }


class MessageTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer needs from its request.

    Attributes:
        edits: what the context edits have cleared; None if the request has none.
        omits_thinking: whether the text of thinking is in the signature only.
    """

    edits: list[AppliedEdit] | None
    omits_thinking: bool


class TokensBeforeEdits(msgspec.Struct, frozen=True):
    original_input_tokens: int


class TokenCount(msgspec.Struct, frozen=True):
    """Attributes: `context_management` is present if the request has it."""

    input_tokens: int
    context_management: TokensBeforeEdits | UnsetType = UNSET


class MessagesRequest(CountTokensRequest, GenerationOptions):
    """A turn of a conversation."""

    max_tokens: Annotated[int, Field(ge=1)]
    """Most tokens of thinking and answer together."""
    tool_choice: AnthropicToolChoice | None = None
    """Which tools may or must be called."""
    output_format: OutputFormat | None = None
    """Old name of `format` in `output_config`."""
    stop_sequences: Annotated[
        list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True), AtMost(MAX_STOP)
    ] = Field(default_factory=list)
    """Strings that end the output."""
    metadata: AnthropicMetadata | None = None
    """Changes nothing: the client's notes."""
    service_tier: Annotated[str, only("auto", "standard_only")] | None = None
    """Changes nothing: there is one tier."""

    @property
    def omits_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

    def chat(self, conversation: Sequence[AnthropicMessage]) -> ChatBody:
        body = super().chat(conversation)
        body.fields["max_tokens"] = self.max_tokens
        body.fields["stop"] = self.stop_sequences
        return body


class MessageJobs:
    """Makes jobs of messages.

    Its methods raise as `RequestReader.read`.
    """

    def __init__(self, parser: BodyParser, chats: "ChatJobs") -> None:
        self._parser = parser
        self._chats = chats
        self._num_tokens = partial(chats.num_tokens, is_cut=True)

    def read(self, body: bytes, *, is_rendered: bool = False) -> Iterator[Part | End]:
        """Yield warnings, and the job of a body. Args: is_rendered: the prompt is the answer."""
        request = self._parser.parse(MessagesRequest, body)
        chat, edits = request.edited(self._num_tokens)
        yield from left_out(request.left_out_tools)
        yield from self._chats.read_other(
            request.shared_options(),
            chat,
            "messages",
            field_names={"prompt": "messages", "stop": "stop_sequences"},
            terms=MessageTerms(
                edits=None if request.context_management is None else edits,
                omits_thinking=request.omits_thinking,
            ),
            bounds_output=True,
            is_rendered=is_rendered,
        )

    def count_tokens(self, body: bytes) -> Iterator[Part | End]:
        """Return the length of a conversation's prompt as the answer."""
        request = self._parser.parse(CountTokensRequest, body)
        chat, edits = request.edited(self._num_tokens)
        count = self._num_tokens(chat)
        before: TokensBeforeEdits | UnsetType = UNSET
        if request.context_management is not None:
            before = TokensBeforeEdits(count + sum(edit.cleared_input_tokens for edit in edits))
        yield from answered(TokenCount(count, before))


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
    "thinking_token_budget": "thinking.budget_tokens",
    "enable_thinking": "thinking.type",
}
"""Key the path of a chat's field, value its path in this API; `*` stands for an index."""
