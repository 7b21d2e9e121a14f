"""Formats a response, whole or as events."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import msgspec

from legato.api.answer import UsageCounter, notes_of
from legato.api.arrival import Arrival
from legato.api.http.bodies import TypedEvent, in_one_line
from legato.api.http.errors import ApiError
from legato.api.http.json_text import in_pieces, joined, json_pieces
from legato.api.job import Job
from legato.api.openai.logprobs import LogprobsWriter, TokenLogprob
from legato.api.responses.output_items import OutputItems
from legato.api.responses.response_body import ResponseTerms
from legato.api.responses.response_events import (
    EventNumbers,
    IncompleteDetails,
    OutputTokens,
    ResponseAnswer,
    ResponseCompleted,
    ResponseCreated,
    ResponseError,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseQueued,
    ResponseUsage,
    Status,
)
from legato.api.typed_events import TypedEventWriter
from legato.core.outputs import FinishReason
from legato.core.vocabulary import Vocabulary
from legato.language.completion import CompletionDelta
from legato.language.message.message import MessageReader, TextSpan

Keep = Callable[[list[bytes]], bool]
"""Stores a finished response, given in pieces of JSON; returns whether there was room."""


class ResponsesFormat:
    """Formats the answer to one request.

    Args:
        keep: stores the response; None if it must not be stored.
    """

    def __init__(
        self, vocabulary: Vocabulary, job: Job, arrival: Arrival, *, model: str, keep: Keep | None
    ) -> None:
        terms = job.terms_as(ResponseTerms)
        self._arrival = arrival
        self._usage = UsageCounter(job.num_prompt_tokens)
        self._vocabulary = vocabulary
        self._reader = MessageReader(job.answer.message_syntax)
        self._items = OutputItems(arrival.answer_id, terms.renamed_tools)
        self._tokens = OutputTokens(vocabulary, job.params)
        self._finish_reason: FinishReason | None = None
        self._shows_logprobs = terms.shows_logprobs
        self._keep = keep
        # Encoded once: its events, the store and those who follow it share these bytes.
        shown = {name: in_pieces([in_one_line(data)]) for name, data in terms.shown.items()}
        self._fixed: dict[str, Any] = {
            **shown,
            "id": f"resp_{arrival.answer_id}",
            "created_at": int(time.time()),
            "model": model,
            "store": keep is not None,
            "background": terms.is_background,
            "temperature": job.params.temperature,
            "top_p": job.params.top_p,
            "presence_penalty": job.params.presence_penalty,
            "frequency_penalty": job.params.frequency_penalty,
        }

    def whole(self) -> "ResponsesFormat":
        return self

    def events(self) -> TypedEventWriter:
        return TypedEventWriter(self, EventNumbers().encode)

    def queued(self) -> list[TypedEvent]:
        """Return the events of a response in the background before it is begun."""
        answer = self._answer("queued")
        return [ResponseCreated(response=answer), ResponseQueued(response=answer)]

    def begun(self, _first: CompletionDelta | None) -> list[TypedEvent]:
        answer = self._answer("in_progress")
        created = [] if answer.background else [ResponseCreated(response=answer)]
        return [*created, ResponseInProgress(response=answer)]

    def so_far(self, status: Status) -> ResponseAnswer:
        """Return the response as it is now, with its complete items."""
        return self._answer(status)

    def closed(self, status: Status, error: ApiError | None = None) -> ResponseAnswer:
        """Return the response as it ends early."""
        self._items.close("incomplete")
        shown = error and ResponseError("server_error", error.detail.message)
        return self._answer(status, usage=self._response_usage, error=shown)

    def take(self, choice: int, delta: CompletionDelta) -> list[TypedEvent]:
        self._usage.add(choice, delta)
        self._tokens.add(delta)
        message = self._reader.feed(delta.text, delta.finish_reason, delta.stop_reason)
        self._finish_reason = delta.finish_reason or self._finish_reason
        return self._items.take(message, self._shown_logprobs)

    def ended(self) -> list[TypedEvent]:
        events = self._items.close(self._end_status)
        end = ResponseIncomplete if self._is_cut else ResponseCompleted
        return [*events, end(response=in_pieces(self._kept_pieces()))]

    def failed(self, error: ApiError) -> list[TypedEvent]:
        events = self._items.close("incomplete")
        return [*events, ResponseFailed(response=self.closed("failed", error))]

    def pieces(self) -> Iterator[bytes]:
        self._items.close(self._end_status)
        return self._kept_pieces()

    @property
    def _is_cut(self) -> bool:
        return self._finish_reason is FinishReason.LENGTH

    @property
    def _end_status(self) -> Status:
        return "incomplete" if self._is_cut else "completed"

    @property
    def _response_usage(self) -> ResponseUsage:
        usage = self._usage.so_far
        counted = usage.completion_tokens_details
        if counted is not msgspec.UNSET:
            return ResponseUsage.of(usage, counted.reasoning_tokens)
        return ResponseUsage.of(usage, self._tokens.num_in(self._reader.reasoning_spans))

    @cached_property
    def _logprobs(self) -> LogprobsWriter:
        return LogprobsWriter(self._vocabulary)

    def _shown_logprobs(self, span: TextSpan) -> Sequence[TokenLogprob]:
        scored = self._tokens.scored_in(span)
        return self._logprobs.chat_entries(scored) if self._shows_logprobs else ()

    def _answer(self, status: Status, **known: Any) -> ResponseAnswer:
        fields = {"completed_at": None, "output": list(self._items.done), **self._fixed, **known}
        return ResponseAnswer(status=status, legato=notes_of(self._arrival), **fields)

    def _kept_pieces(self) -> Iterator[bytes]:
        """Yield the finished response in JSON, which says whether it is stored."""
        answer = self._answer(
            self._end_status,
            usage=self._response_usage,
            completed_at=None if self._is_cut else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if self._is_cut else None,
        )
        if self._keep is None:
            yield from json_pieces(answer)
            return
        data: list[bytes] = []
        for piece in stored_pieces(answer):
            data.append(piece)
            yield b""  # a pause, as after each piece
        if self._keep(data):
            yield from data
        else:
            yield from json_pieces(msgspec.structs.replace(answer, store=False))


def stored_pieces(answer: ResponseAnswer) -> Iterator[bytes]:
    """Return the JSON of a response as it is stored, without line ends."""
    return joined(map(in_one_line, json_pieces(answer)))
