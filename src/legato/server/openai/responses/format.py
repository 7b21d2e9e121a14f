"""How a response is worded: whole, or in events."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from legato.core.outputs import FinishReason
from legato.engine.frontend.completion import CompletionDelta
from legato.model.vocabulary import Vocabulary
from legato.server.generation.answer_format import UsageCounter
from legato.server.generation.job import Job
from legato.server.generation.message import MessageReader
from legato.server.http.bodies import encode_json
from legato.server.http.errors import ApiError
from legato.server.openai.logprobs import TokenLogprob, chat_logprobs
from legato.server.openai.responses.events import (
    Event,
    EventNumbers,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
)
from legato.server.openai.responses.items import OutputItems
from legato.server.openai.responses.output import (
    IncompleteDetails,
    ResponseAnswer,
    ResponseError,
    ResponseUsage,
    Status,
)
from legato.server.requests.outcome import Generation, ResponseTerms

Keep = Callable[[bytes], bool]
"""Is given a response at its end, in JSON; whether it could be stored."""


class ResponsesFormat:
    """Words the answer to one request.

    Args:
        keep: None where it is not to be stored.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        asked: Generation,
        job: Job,
        terms: ResponseTerms,
        *,
        model: str,
        keep: Keep | None,
    ) -> None:
        self._usage = UsageCounter(job.prompts)
        self._vocabulary = vocabulary
        self._reader = MessageReader(asked.message_syntax)
        self._items = OutputItems(job.arrival.request_id)
        self._num_reasoning_tokens = 0
        self._finish_reason: FinishReason | None = None
        self._shows_logprobs = terms.shows_logprobs
        self._keep = keep
        shown: dict[str, Any] = {name: msgspec.Raw(data) for name, data in terms.shown.items()}
        self._fixed: dict[str, Any] = {
            **shown,
            "id": f"resp_{job.arrival.request_id}",
            "created_at": int(time.time()),
            "model": model,
            "store": keep is not None,
            "temperature": job.params.temperature,
            "top_p": job.params.top_p,
        }

    def whole(self) -> "_Whole":
        return _Whole(self)

    def events(self) -> "_Events":
        return _Events(self)

    def take(self, choice: int, delta: CompletionDelta) -> list[Event]:
        """The events of one delta."""
        self._usage.add(choice, delta)
        message = self._reader.feed(delta)
        if message.reasoning:
            self._num_reasoning_tokens += len(delta.token_ids)
        self._finish_reason = delta.finish_reason or self._finish_reason
        return self._items.take(message, self._logprobs(delta))

    def begun(self) -> list[Event]:
        """The events before all others."""
        answer = self._answer("in_progress")
        return [ResponseCreated(response=answer), ResponseInProgress(response=answer)]

    def ended(self) -> tuple[list[Event], bytes]:
        """The last events, and the response in JSON, which is kept as well."""
        is_cut = self._finish_reason is FinishReason.LENGTH
        status: Status = "incomplete" if is_cut else "completed"
        events = self._items.close(status)
        told = self._answer(
            status,
            usage=self._response_usage,
            completed_at=None if is_cut else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
        )
        answer = encode_json(told)
        if self._keep is not None and not self._keep(answer):
            answer = encode_json(msgspec.structs.replace(told, store=False))
        end = ResponseIncomplete if is_cut else ResponseCompleted
        return [*events, end(response=msgspec.Raw(answer))], answer

    def failed(self, error: ApiError) -> list[Event]:
        events = self._items.close("incomplete")
        problem = ResponseError("server_error", error.detail.message)
        answer = self._answer("failed", usage=self._response_usage, error=problem)
        return [*events, ResponseFailed(response=answer)]

    @property
    def _response_usage(self) -> ResponseUsage:
        return ResponseUsage.of(self._usage.so_far, self._num_reasoning_tokens)

    def _logprobs(self, delta: CompletionDelta) -> Sequence[TokenLogprob]:
        if not self._shows_logprobs:
            return ()
        logprobs = chat_logprobs(self._vocabulary, delta.logprobs)
        return () if logprobs is None else logprobs.content

    def _answer(self, status: Status, **known: Any) -> ResponseAnswer:
        fields = {"completed_at": None, "output": list(self._items.done), **self._fixed, **known}
        return ResponseAnswer(status=status, **fields)


class _Whole:
    def __init__(self, words: ResponsesFormat) -> None:
        self._words = words

    def take(self, choice: int, delta: CompletionDelta) -> None:
        self._words.take(choice, delta)

    def body(self) -> bytes:
        _, answer = self._words.ended()
        return answer


class _Events:
    def __init__(self, words: ResponsesFormat) -> None:
        self._words = words
        self._numbers = EventNumbers()
        self._has_begun = False

    def delta(self, choice: int, delta: CompletionDelta) -> bytes:
        return self._begun() + self._numbers.written(self._words.take(choice, delta))

    def end(self) -> bytes:
        events, _ = self._words.ended()
        return self._begun() + self._numbers.written(events)

    def failed(self, error: ApiError) -> bytes:
        return self._begun() + self._numbers.written(self._words.failed(error))

    def _begun(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return self._numbers.written(self._words.begun())
