"""Answers of the chat and completions endpoints: choices, and chunks of the same shape."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property

import msgspec
from fastapi.responses import Response
from msgspec import UNSET, UnsetType

from legato.api.answer import (
    AnswerTimes,
    NotedAnswer,
    PromptProgress,
    Usage,
    UsageCounter,
    notes_of,
    respond,
)
from legato.api.arrival import Arrival
from legato.api.context import ApiContext
from legato.api.http.bodies import DONE, event, json_event
from legato.api.http.errors import ApiError
from legato.api.http.json_text import array, json_pieces, numbers
from legato.api.job import Job
from legato.api.openai.logprobs import LogprobsWriter
from legato.api.submit import JobRun
from legato.core.outputs import FinishReason
from legato.core.vocabulary import Vocabulary
from legato.engine.client.kv_tickets import KVTransferParams
from legato.language.completion import Completion, CompletionDelta

UsageField = Usage | None | msgspec.UnsetType
_LEAST_S = 1e-6


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """How long an answer took, in llama-server's words.

    Attributes:
        cache_n, prompt_n: tokens of the prompt that were cached, and that were computed.
        prompt_ms: from the first step to the first token.
        predicted_n, predicted_ms: tokens of the output, and the time after the first one.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float

    @classmethod
    def of(cls, times: AnswerTimes, usage: Usage) -> "Timings":
        num_cached = usage.prompt_tokens_details.cached_tokens
        num_prompt, num_output = usage.prompt_tokens - num_cached, usage.completion_tokens
        return cls(
            cache_n=num_cached,
            prompt_n=num_prompt,
            prompt_ms=1e3 * times.prompt_s,
            prompt_per_token_ms=1e3 * times.prompt_s / max(1, num_prompt),
            prompt_per_second=num_prompt / max(times.prompt_s, _LEAST_S),
            predicted_n=num_output,
            predicted_ms=1e3 * times.output_s,
            predicted_per_token_ms=1e3 * times.output_s / max(1, num_output - 1),
            predicted_per_second=max(0, num_output - 1) / max(times.output_s, _LEAST_S),
        )


class TimedAnswer(NotedAnswer, frozen=True, kw_only=True):
    """Attributes: both if asked for; `prompt_progress` before a stream's first token."""

    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET


class ChunkFormat(ABC):
    """Formats the answers and chunks of one endpoint to one request.

    Args:
        ticket: as of `JobRun`.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        job: Job,
        *,
        answer_id: str,
        model: str,
        ticket: KVTransferParams | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._job = job
        self._options = job.answer
        self._id = answer_id
        self._created = int(time.time())
        self._model = model
        self._ticket = ticket

    @abstractmethod
    def answer(self, completions: list[Completion], usage: Usage) -> TimedAnswer:
        """Return the answer for `json_pieces`. Completions are in order of their choice index."""

    @abstractmethod
    def chunk(self, choice: int, delta: CompletionDelta, usage: UsageField) -> TimedAnswer:
        """Return the chunk of one delta."""

    @abstractmethod
    def usage_chunk(self, usage: UsageField) -> TimedAnswer:
        """Return a chunk without choices: the last one, if the request asked for usage."""

    @cached_property
    def _logprobs(self) -> LogprobsWriter:
        return LogprobsWriter(self._vocabulary, names_by_id=self._options.names_tokens_by_id)

    def _tokens(self, token_ids: Sequence[int]) -> list[int] | UnsetType:
        """Return token ids in JSON, if the request asked for them."""
        return array(numbers(token_ids)) if self._options.returns_token_ids else UNSET


async def respond_in_chunks(
    context: ApiContext, job: Job, arrival: Arrival, answer_id: str, kind: type[ChunkFormat]
) -> Response:
    """Run a job and answer its request, streamed or whole. Raises as `respond`."""
    run = JobRun(context, job, arrival)
    words = kind(
        context.engine.vocabulary,
        job,
        answer_id=answer_id,
        model=context.model_name,
        ticket=run.ticket,
    )
    return await respond(run, InChunks(words, job, arrival, is_timed=context.shows_timings))


class InChunks:
    """The `AnswerFormat` of a `ChunkFormat` and a job.

    Args:
        is_timed: whether the answer's end has timings in any case.
    """

    def __init__(
        self, words: ChunkFormat, job: Job, arrival: Arrival, *, is_timed: bool = False
    ) -> None:
        self._words = words
        self._job = job
        self._arrival = arrival
        self._is_timed = is_timed or job.answer.times_pieces

    def whole(self) -> "_Choices":
        return _Choices(self._words, self._job, self._arrival, self._times)

    def events(self) -> "_ChunkWriter":
        return _ChunkWriter(self._words, self._job, self._arrival, self._times)

    @property
    def _times(self) -> AnswerTimes | None:
        return AnswerTimes() if self._is_timed else None


class _Choices:
    """Collects the completions of a whole answer.

    Args:
        times: None if the answer has no timings.
    """

    def __init__(
        self, words: ChunkFormat, job: Job, arrival: Arrival, times: AnswerTimes | None
    ) -> None:
        self._times = times
        self._words = words
        self._arrival = arrival
        self._is_echo_only = job.answer.is_echo_only
        self._completions = [Completion(choice) for choice in range(job.num_choices)]
        self._usage = UsageCounter(job.num_prompt_tokens)

    def take(self, choice: int, delta: CompletionDelta) -> None:
        if self._is_echo_only:
            delta = _without_output(delta)
        self._usage.add(choice, delta)
        if self._times is not None:
            self._times.add(delta)
        self._completions[choice].add(delta)

    def pieces(self) -> Iterator[bytes]:
        answer = self._words.answer(self._completions, self._usage.so_far)
        return json_pieces(_noted(_timed(answer, self._times, self._usage), self._arrival))


class _ChunkWriter:
    """Writes one chunk per delta, then [DONE]. Args: as of `_Choices`."""

    def __init__(
        self, words: ChunkFormat, job: Job, arrival: Arrival, times: AnswerTimes | None
    ) -> None:
        self._times = times
        self._words = words
        self._arrival = arrival
        self._options = job.answer
        self._usage = UsageCounter(job.num_prompt_tokens)

    def delta(self, choice: int, delta: CompletionDelta) -> bytes:
        if self._options.is_echo_only:
            delta = _without_output(delta)
        self._usage.add(choice, delta)
        chunk = self._words.chunk(choice, delta, self._usage_field)
        if self._times is not None:
            self._times.add(delta)
            if self._options.times_pieces or delta.finish_reason is not None:
                chunk = _timed(chunk, self._times, self._usage)
        if delta.finish_reason is not None and not self._options.include_usage:
            chunk = _noted(chunk, self._arrival)  # it may be the stream's last
        return json_event(chunk)

    def end(self) -> list[bytes]:
        if not self._options.include_usage:
            return [DONE]
        chunk = _timed(self._words.usage_chunk(self._usage.so_far), self._times, self._usage)
        return [json_event(_noted(chunk, self._arrival)), DONE]

    def progress(self, progress: PromptProgress) -> bytes:
        chunk = self._words.usage_chunk(UNSET)
        return json_event(msgspec.structs.replace(chunk, prompt_progress=progress))

    def failed(self, error: ApiError) -> list[bytes]:
        return [event(error.body), DONE]

    @property
    def _usage_field(self) -> UsageField:
        if not self._options.include_usage:
            return UNSET
        return self._usage.so_far if self._options.continuous_usage_stats else None


def _timed(answer: TimedAnswer, times: AnswerTimes | None, usage: UsageCounter) -> TimedAnswer:
    if times is None:
        return answer
    return msgspec.structs.replace(answer, timings=Timings.of(times, usage.so_far))


def _noted(answer: TimedAnswer, arrival: Arrival) -> TimedAnswer:
    return msgspec.structs.replace(answer, legato=notes_of(arrival))


def _without_output(delta: CompletionDelta) -> CompletionDelta:
    """Return a delta for a request that asked only for its prompt."""
    return msgspec.structs.replace(
        delta,
        text="",
        token_ids=(),
        logprobs=None if delta.logprobs is None else (),
        finish_reason=delta.finish_reason and FinishReason.LENGTH,
        stop_reason=None,
    )
