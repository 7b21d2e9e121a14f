"""The body of POST /v1/responses, converted to a chat, and the job made of it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from pydantic import Field, model_validator

from legato.api.bodies.as_chat import ChatBody, left_out
from legato.api.bodies.body_model import AtMost, BodyParser, Name, OrText, RequestModel, only
from legato.api.bodies.generation_options import GenerationOptions, NumLogprobs
from legato.api.bodies.hints import (
    CacheRetention,
    Metadata,
    OtherServersHints,
    ServiceTier,
    Verbosity,
)
from legato.api.job import End, Job, NeedsStored, Part, answered
from legato.api.limits import (
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_REPEATED_BYTES,
    MAX_REPEATED_FIELD_BYTES,
    MAX_TEMPLATE_VARIABLES,
    MAX_TOOLS,
)
from legato.api.responses.input_items import (
    AnyItem,
    Item,
    ItemReference,
    Placed,
    Stored,
    messages_of,
    shown_item,
    truncated,
)
from legato.api.responses.response_tools import (
    CalledTool,
    OfferedTools,
    ResponseTool,
    ResponseToolChoice,
)
from legato.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from legato.api.openai.chat_job import ChatJobs

_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (
    _LOGPROBS,
    # These are shown anyway, or belong to tools that do not exist here.
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)


class TextFormat(RequestModel):
    """Form of an answer; all but `type` are for "json_schema" only."""

    type: Literal["text", "json_object", "json_schema"]
    """Kind of output."""
    name: Name | None = None
    """Changes nothing: the model is not shown it."""
    description: str | None = None
    """Changes nothing: the model is not shown it."""
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """JSON schema, with `json_schema`."""
    strict: bool | None = None
    """Hold the answer to the schema."""

    @model_validator(mode="after")
    def _check_together(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise InvalidRequestError(
                "schema goes with type: json_schema, which needs it", param="text.format.schema"
            )
        return self

    def chat(self) -> dict[str, Any]:
        """Return the `response_format` of a chat."""
        if self.type != "json_schema":
            return {"type": self.type}
        schema = {"name": self.name or "response", "schema": self.schema_, "strict": self.strict}
        return {"type": self.type, "json_schema": schema}


class TextOptions(RequestModel):
    format: TextFormat | None = None
    """Text, JSON, or JSON by a schema."""
    verbosity: Verbosity | None = None
    """Changes nothing: say it in the prompt."""


class ReasoningOptions(RequestModel):
    """How much the model thinks."""

    effort: Name | None = None
    """As `reasoning_effort` of a chat."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Changes nothing: reasoning is shown whole."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """Changes nothing: reasoning is shown whole."""


class ResponseStreamOptions(RequestModel):
    include_obfuscation: Annotated[bool, only(False)] | None = None
    """Padding is not supported."""


class ResponseTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a response needs from its request.

    Attributes:
        shown: the fields that the response repeats; key the field, value JSON.
        renamed_tools: key the model's name of a tool.
    """

    shown: dict[str, bytes]
    previous_response_id: str | None
    is_stored: bool
    is_background: bool
    shows_logprobs: bool
    renamed_tools: dict[str, CalledTool] = {}


class InputTokenCount(msgspec.Struct, frozen=True):
    """The length of a response's prompt."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ResponsesRequest(OtherServersHints, GenerationOptions):
    """A turn of a conversation; the server may have stored the earlier turns."""

    input: Annotated[
        list[AnyItem],
        Field(min_length=1, fail_fast=True),
        AtMost(MAX_MESSAGES),
        OrText(lambda text: [{"role": "user", "content": text}]),
    ]
    """Text, or the conversation's items."""
    instructions: str | None = None
    """System message before all others; not stored."""
    previous_response_id: Name | None = None
    """Stored response to continue."""
    store: bool = True
    """Keep the response for later turns."""
    background: bool = False
    """Answer [at once](#responses-in-the-background), and compute the response later."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens to generate; by default `--default-max-tokens`, or what the context holds."""
    tools: Annotated[list[ResponseTool], Field(fail_fast=True), AtMost(MAX_TOOLS)] = Field(
        default_factory=list
    )
    """`function`, `custom` and `namespace`; hosted tools are left out."""
    tool_choice: ResponseToolChoice = "auto"
    """Which tools may or must be called, in OpenAI's forms."""
    parallel_tool_calls: bool = True
    """Allow several calls at once."""
    text: TextOptions | None = None
    """Form of the answer."""
    reasoning: ReasoningOptions | None = None
    """`effort` is `reasoning_effort` of a chat; summaries change nothing."""
    truncation: Literal["auto", "disabled"] = "disabled"
    """`auto` drops first turns of a conversation that is too long."""
    include: Annotated[list[Annotated[str, only(*_INCLUDED)]], AtMost(len(_INCLUDED))] = Field(
        default_factory=list
    )
    """Only `message.output_text.logprobs` changes the answer."""
    top_logprobs: NumLogprobs | None = None
    """Log probabilities of this many most likely tokens."""
    stream_options: ResponseStreamOptions | None = None
    """Changes nothing: there is no padding."""
    chat_template_kwargs: Annotated[dict[str, Any], AtMost(MAX_TEMPLATE_VARIABLES)] | None = None
    """Variables of the chat template."""

    # Hints, and values that change nothing.
    client_metadata: Annotated[dict[str, Any], AtMost(MAX_METADATA)] | None = None
    """Changes nothing: the client's notes."""
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None  # of tools that a server runs
    """Changes nothing: the server runs no tools."""
    metadata: Metadata | None = None
    """Changes nothing: the client's notes."""
    prompt_cache_key: Name | None = None
    """Changes nothing: equal prompts share their cache."""
    prompt_cache_options: dict[str, Any] | None = None
    """Changes nothing: the cache is automatic."""
    prompt_cache_retention: CacheRetention | None = None
    """Changes nothing: blocks stay while memory allows."""
    safety_identifier: Name | None = None
    """Changes nothing: the client's note."""
    service_tier: ServiceTier | None = None
    """Changes nothing: see `slo_class` and `priority`."""
    user: Name | None = None
    """Changes nothing: the client's note."""

    @model_validator(mode="after")
    def _check_background(self) -> "ResponsesRequest":
        if self.background and not self.store:
            raise InvalidRequestError(
                "background can only be used when `store` is true", param="background"
            )
        return self

    @property
    def referred(self) -> list[str]:
        """Ids of the stored items that the input refers to."""
        return [item.id for item in self.input if isinstance(item, ItemReference)]

    @property
    def offered_tools(self) -> OfferedTools:
        return OfferedTools.of(self.tools)

    @property
    def shows_logprobs(self) -> bool:
        return _LOGPROBS in self.include or bool(self.top_logprobs)

    def items(self, history: Iterable[Item], found: Mapping[str, Item]) -> list[Placed]:
        """Return the items of the whole conversation.

        Args:
            history: items of the earlier turns.
            found: stored items; key the id.

        Raises:
            InvalidRequestError: as `own_items`.
        """
        own = [(f"input.{i}", item) for i, item in enumerate(self.own_items(found))]
        return [*(("previous_response_id", item) for item in history), *own]

    def chat(self, items: Iterable[Placed]) -> ChatBody:
        """Convert the request to a chat. Args: items: of the whole conversation."""
        offered = self.offered_tools
        messages = list(messages_of(items))
        if self.instructions is not None:
            messages.insert(0, ("instructions", {"role": "system", "content": self.instructions}))
        return ChatBody(
            fields={
                "messages": [message for _, message in messages],
                "max_completion_tokens": self.max_output_tokens,
                "logprobs": self.shows_logprobs,
                "top_logprobs": (self.top_logprobs or 0) if self.shows_logprobs else None,
                "chat_template_kwargs": self.chat_template_kwargs,
                "response_format": self.text and self.text.format and self.text.format.chat(),
                "reasoning_effort": self.reasoning and self.reasoning.effort,
                "service_tier": self.service_tier,
                "prompt_cache_retention": self.prompt_cache_retention,
                "verbosity": self.text and self.text.verbosity,
                **self.model_dump(include=set(OtherServersHints.model_fields)),
                **self._tool_fields(offered),
            },
            places=[place for place, _ in messages],
            names={**_NAMES, **offered.names},
            input_grammars=offered.input_grammars,
        )

    def own_items(self, found: Mapping[str, Item]) -> list[Item]:
        """Return the input items, with references resolved.

        Raises:
            InvalidRequestError: a referred item is not stored, or referred to twice.
        """
        seen = set[str]()
        for i, item in enumerate(self.input):
            if not isinstance(item, ItemReference):
                continue
            if item.id not in found:
                raise InvalidRequestError(
                    f"the item {item.id!r} is not stored", param=f"input.{i}", code="item_not_found"
                )
            if item.id in seen:  # or a short body could fill the store
                raise InvalidRequestError(f"{item.id!r} is referred to twice", param=f"input.{i}")
            seen.add(item.id)
        return [found[item.id] if isinstance(item, ItemReference) else item for item in self.input]

    def shown(self) -> dict[str, bytes]:
        """Return the fields that the answer repeats: key the field, value JSON.

        Raises:
            InvalidRequestError: one of them is too long, or all together.
        """
        text = self.text or TextOptions()
        form = text.format or TextFormat(type="text")
        told = {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "prompt_cache_retention": self.prompt_cache_retention,
            "reasoning": {
                "effort": self.reasoning and self.reasoning.effort,
                "summary": self.reasoning and self.reasoning.summary,
            },
            "safety_identifier": self.safety_identifier,
            "text": {
                "format": form.model_dump(by_alias=True, exclude_none=True),
                "verbosity": text.verbosity,
            },
            "tool_choice": self.tool_choice,
            "tools": [tool.shown() for tool in self.tools],
            "top_logprobs": self.top_logprobs or 0,
            "truncation": self.truncation,
            "user": self.user,
        }
        shown = {name: msgspec.json.encode(value) for name, value in told.items()}
        longest = max(shown, key=lambda name: len(shown[name]))
        for what, num_bytes, limit in (
            (longest, len(shown[longest]), MAX_REPEATED_FIELD_BYTES),
            ("all fields", sum(map(len, shown.values())), MAX_REPEATED_BYTES),
        ):
            if num_bytes > limit:
                raise InvalidRequestError(
                    f"{what}: {num_bytes} bytes of JSON for the answer to repeat, over {limit}",
                    param=longest,
                )
        return shown

    def terms(self) -> ResponseTerms:
        """Return what the answer needs; raises as `shown`."""
        return ResponseTerms(
            shown=self.shown(),
            previous_response_id=self.previous_response_id,
            is_stored=self.store,
            is_background=self.background,
            shows_logprobs=self.shows_logprobs,
            renamed_tools=self.offered_tools.renamed,
        )

    def _tool_fields(self, offered: OfferedTools) -> dict[str, Any]:
        """Return the chat's fields for tools."""
        return {
            "tools": offered.functions,
            "tool_choice": offered.choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
        }


class ResponseJobs:
    """Makes jobs of responses.

    Its methods raise as `RequestReader.read`.
    """

    def __init__(self, parser: BodyParser, chats: "ChatJobs") -> None:
        self._parser = parser
        self._chats = chats

    def read(
        self, body: bytes, stored: bytes | None, *, is_rendered: bool = False
    ) -> Iterator[Part | End]:
        """Yield the input items to store, warnings, and the job of a body.

        Args:
            stored: as of `RequestReader.read`.
            is_rendered: whether the prompt is the answer.
        """
        request = self._parser.parse(ResponsesRequest, body)
        needs_turns = request.previous_response_id is not None or request.referred
        if stored is None and needs_turns:
            yield NeedsStored(request.previous_response_id, request.referred)
            return
        turns = Stored(stored or b"")
        found = turns.items()
        offered = request.offered_tools
        yield from left_out(offered.left_out)
        terms = request.terms()
        if request.store:
            yield from map(shown_item, request.own_items(found))
        items = request.items(turns.history(request.previous_response_id), found)
        if request.truncation == "auto":
            items = truncated(items, partial(self._fits, request))
        yield from self._chats.read_other(
            request.shared_options(),
            request.chat(items),
            "responses",
            field_names={"prompt": "input", "max_tokens": "max_output_tokens"},
            terms=terms,
            is_rendered=is_rendered,
        )

    def render(self, body: bytes) -> Iterator[Part | End]:
        """Yield the same of a response whose prompt is the answer; refuse one that needs others."""
        for part in self.read(body, None, is_rendered=True):
            if isinstance(part, NeedsStored):
                raise InvalidRequestError(
                    "a prompt that goes on from a stored response is not rendered",
                    param="input" if part.item_ids else "previous_response_id",
                )
            yield part

    def count_tokens(self, body: bytes, stored: bytes | None) -> Iterator[Part | End]:
        """Return the length of a response's prompt as the answer."""
        for part in self.read(body, stored):
            if isinstance(part, Job):
                yield from answered(InputTokenCount(part.num_prompt_tokens))
            elif isinstance(part, NeedsStored):
                yield part

    def _fits(self, request: ResponsesRequest, items: Sequence[Placed]) -> bool:
        """Whether a conversation leaves room for the requested output."""
        try:
            num_tokens = self._chats.num_tokens(request.chat(items), is_cut=False)
        except InvalidRequestError as error:
            if error.code == "context_length_exceeded":
                return False
            raise
        serving, wanted = self._parser.serving, request.max_output_tokens or 1
        most = serving.max_output_tokens or wanted
        return num_tokens <= serving.info.max_model_len - min(wanted, most)


_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
"""Key the path of a chat's field, value its path in this API; `*` stands for an index."""
