"""A response as it is answered, and the events of a streamed one."""

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from legato.api.answer import NotedAnswer, Usage
from legato.api.http.bodies import TypedEvent
from legato.api.http.json_text import json_pieces
from legato.api.openai.logprobs import TokenLogprob
from legato.core.outputs import TokenLogprobs
from legato.core.sampling_params import SamplingParams
from legato.core.vocabulary import Vocabulary
from legato.language.completion import CompletionDelta
from legato.language.message.message import TextSpan
from legato.language.output_text import Detokenizer

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


class ResponseCreated(TypedEvent, frozen=True, tag="response.created"):
    response: ResponseAnswer | msgspec.Raw


class ResponseQueued(TypedEvent, frozen=True, tag="response.queued"):
    response: ResponseAnswer | msgspec.Raw


class ResponseInProgress(TypedEvent, frozen=True, tag="response.in_progress"):
    response: ResponseAnswer | msgspec.Raw


class ResponseCompleted(TypedEvent, frozen=True, tag="response.completed"):
    response: ResponseAnswer | msgspec.Raw


class ResponseIncomplete(TypedEvent, frozen=True, tag="response.incomplete"):
    response: ResponseAnswer | msgspec.Raw


class ResponseFailed(TypedEvent, frozen=True, tag="response.failed"):
    response: ResponseAnswer | msgspec.Raw


class ItemAdded(TypedEvent, frozen=True, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(TypedEvent, frozen=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class _OfItem(TypedEvent, frozen=True):
    item_id: str
    output_index: int


class _OfPart(_OfItem, frozen=True):
    content_index: int


class PartAdded(_OfPart, frozen=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(_OfPart, frozen=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextDelta(_OfPart, frozen=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(_OfPart, frozen=True, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(_OfPart, frozen=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_OfPart, frozen=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(_OfItem, frozen=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_OfItem, frozen=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class InputDelta(_OfItem, frozen=True, tag="response.custom_tool_call_input.delta"):
    delta: str


class InputDone(_OfItem, frozen=True, tag="response.custom_tool_call_input.done"):
    input: str


class StreamError(TypedEvent, frozen=True, tag="error"):
    """The last event of a stream whose response is no longer stored."""

    sequence_number: int
    code: str = "response_not_stored"
    message: str = "the response is no longer stored: it was deleted, or others took its room"
    param: str | None = None


class EventNumbers:
    """Numbers events from 0, in the order in which they are written."""

    def __init__(self) -> None:
        self._next = 0

    def encode(self, event: TypedEvent) -> Iterator[bytes]:
        """Yield the next event's JSON, in pieces."""
        yield b'{"sequence_number":%d,' % self._next
        self._next += 1
        pieces = json_pieces(event)
        yield next(pieces)[1:]
        yield from pieces


class OutputTokens:
    """The tokens of one completion.

    A part of the message may come later than its tokens: space and possible marks wait for the text
    after them.
    """

    def __init__(self, vocabulary: Vocabulary, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(
            vocabulary,
            skip_special_tokens=params.skip_special_tokens,
            kept=params.kept_special_tokens,
        )
        self._num_chars = 0
        self._ends = array("L")  # of all tokens, in characters
        self._scored: deque[tuple[int, int, TokenLogprobs]] = deque()  # start, end, entry

    def add(self, delta: CompletionDelta) -> None:
        """Add a delta's tokens."""
        entries = delta.logprobs or ()
        for i, token_id in enumerate(delta.token_ids):
            start = self._num_chars
            self._num_chars += len(self._detokenizer.push(token_id))
            self._ends.append(self._num_chars)
            if i < len(entries):
                self._scored.append((start, self._num_chars, entries[i]))

    def scored_in(self, span: TextSpan) -> list[TokenLogprobs]:
        """Return the entries of a span's tokens, once; spans must come in order.

        A token without text of its own, the first bytes of a character, goes with the next one.
        """
        found = []
        while self._scored and self._scored[0][0] < span.end:
            start, end, entry = self._scored.popleft()
            if end > span.start or start == span.start:
                found.append(entry)
        return found

    def num_in(self, places: Iterable[tuple[int, int | None]]) -> int:
        """Return how many tokens stand in parts of the text, wholly or partly.

        Args:
            places: where each begins and ends; None for the end of one that is open.
        """
        return sum(self._num_between(start, end) for start, end in places)

    def _num_between(self, start: int, end: int | None) -> int:
        first = bisect_right(self._ends, start) if start else 0
        last = len(self._ends) if end is None else bisect_left(self._ends, end) + 1
        return max(0, min(last, len(self._ends)) - first)
