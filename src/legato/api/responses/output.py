"""A response's parts, in OpenAI's format."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from legato.api.answer import NotedAnswer, Usage
from legato.api.openai.logprobs import TokenLogprob

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    status: Status
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputReasoning(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """Attributes: `summary` is empty: `content` has the whole reasoning."""

    id: str
    status: Status
    content: list[ReasoningText]
    summary: list[dict[str, Any]] = []


class OutputFunctionCall(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """Attributes: `arguments` is a JSON text; `namespace` is of the tool, if it has one."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class OutputCustomToolCall(msgspec.Struct, frozen=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool. Attributes: as of `OutputFunctionCall`, but `input` is any text."""

    id: str
    status: Status
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomToolCall


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage, num_reasoning_tokens: int) -> "ResponseUsage":
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(num_reasoning_tokens),
            total_tokens=usage.total_tokens,
        )


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class ResponseAnswer(NotedAnswer, frozen=True, kw_only=True):
    """A response, in progress or finished.

    Fields that repeat the request hold its JSON rather than values of these types.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: Status
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    store: bool
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    background: bool
    service_tier: str = "default"

    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    truncation: str
    user: str | None
