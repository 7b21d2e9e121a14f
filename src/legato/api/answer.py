"""Turns the deltas of a job into its HTTP answer: one JSON object, or a stream."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Literal, Protocol

import msgspec
from fastapi.responses import Response
from msgspec import UNSET, UnsetType
from starlette.types import Receive, Scope, Send

from legato.api.arrival import Arrival
from legato.api.http.bodies import EVENT_STREAM, EventResponse
from legato.api.http.errors import ApiError, as_api_error
from legato.api.http.outlet import Outlet, PacedResponse, send_paced
from legato.api.limits import MAX_UNREAD_BYTES
from legato.api.submit import JobRun
from legato.core.errors import naming_fields
from legato.core.sampling_params import SamplingParams
from legato.core.step_record import ChunkRecord, StepRecord
from legato.core.version import __version__
from legato.engine.client.submissions import Submission
from legato.engine.errors import SlowReaderError
from legato.language.completion import CompletionDelta
from legato.observe.traces.feed import Subscription

FINGERPRINT = f"legato-{__version__}"
"""OpenAI's `system_fingerprint`: with the same one and the same seed, outputs are alike."""
_DELTA_BYTES, _SCORE_BYTES = 700, 120
"""Memory of one waiting delta, and of each log probability in it."""

logger = logging.getLogger(__name__)


class LegatoNotes(msgspec.Struct, frozen=True):
    """Notes on one answer.

    Attributes:
        warnings: the fields and tools of the request that had no effect.
        thinking: "cut" if thinking was ended at its budget, in any choice.
    """

    warnings: list[str]
    thinking: Literal["cut"] | UnsetType = UNSET


class NotedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes: `legato` is present if there is something to note."""

    legato: LegatoNotes | UnsetType = UNSET


def notes_of(arrival: Arrival) -> LegatoNotes | UnsetType:
    """Return the `legato` of a request's answer, if there is something to note."""
    if arrival.cut_choices:
        return LegatoNotes(arrival.warnings, "cut")
    return LegatoNotes(arrival.warnings) if arrival.warnings else UNSET


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """OpenAI's usage object. Attributes: the last is present if a chat's model thought."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class UsageCounter:
    """Counts the tokens of one request. Each prompt counts once, for any `n`."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_cached_tokens: dict[int, int] = {}  # key: index of a prompt's first choice
        self._num_output_tokens = 0
        self._num_thinking_tokens: dict[int, int] = {}  # key: choice

    def add(self, choice: int, delta: CompletionDelta) -> None:
        if delta.output.num_thinking_tokens:
            self._num_thinking_tokens[choice] = delta.output.num_thinking_tokens
        self._num_output_tokens += len(delta.token_ids)
        self.add_cached(choice, delta)

    def add_cached(self, choice: int, delta: CompletionDelta) -> None:
        """Count the cached tokens of a delta's prompt, which each delta repeats."""
        num_cached = delta.output.num_cached_tokens
        if delta.index == 0 and num_cached:
            self._num_cached_tokens[choice] = num_cached

    @property
    def so_far(self) -> Usage:
        return Usage(
            self._num_prompt_tokens,
            self._num_output_tokens,
            self._num_prompt_tokens + self._num_output_tokens,
            PromptTokensDetails(sum(self._num_cached_tokens.values())),
            CompletionTokensDetails(sum(thought))
            if (thought := self._num_thinking_tokens.values())
            else UNSET,
        )


class AnswerTimes:
    """When an answer's prompt and output were computed, by what came of them.

    Attributes:
        output_s: seconds from its first token to its latest.
    """

    def __init__(self) -> None:
        self._scheduled_s: float | None = None
        self._first_s: float | None = None
        self.output_s = 0.0

    def add(self, delta: CompletionDelta) -> None:
        if self._first_s is None:
            self._first_s = delta.received_s
        if self._scheduled_s is None:
            self._scheduled_s = delta.output.scheduled_s
        self.output_s = max(0.0, delta.received_s - self._first_s)

    @property
    def prompt_s(self) -> float:
        """Seconds from the planning of its first step to its first token."""
        if self._first_s is None or self._scheduled_s is None:
            return 0.0
        return max(0.0, self._first_s - self._scheduled_s)


class PromptProgress(msgspec.Struct, frozen=True):
    """How far a prompt is computed, in llama-server's words.

    Attributes:
        total: tokens of the prompt.
        cache: of these, tokens that did not have to be computed.
        processed: tokens so far, with the cached ones.
        time_ms: since its first step began.
    """

    total: int
    cache: int
    processed: int
    time_ms: float


class WholeAnswer(Protocol):
    """An answer in one JSON object."""

    def take(self, choice: int, delta: CompletionDelta) -> object:
        """Add a delta."""

    def pieces(self) -> Iterable[bytes]:
        """Return the answer's JSON after the last delta; each piece is made when it is read."""


class EventWriter(Protocol):
    """Formats an answer as server-sent events, or as lines."""

    def delta(self, choice: int, delta: CompletionDelta) -> bytes:
        """Return the events of one delta; with the first delta, the stream's first events too."""

    def end(self) -> Iterable[bytes]:
        """Return the pieces after the last delta; each is made when it is read."""

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """Return the last pieces of a stream that an error ends."""


class AnswerFormat(Protocol):
    """How one endpoint formats an answer, whole or as events."""

    def whole(self) -> WholeAnswer: ...

    def events(self) -> EventWriter: ...


async def respond(
    run: JobRun, answer_format: AnswerFormat, media_type: str = EVENT_STREAM
) -> Response:
    """Run a job and answer its request, streamed or whole.

    Args:
        media_type: of a stream.

    Raises:
        Exception: as `JobRun.submitted`, if the answer is not streamed.
    """
    if run.job.answer.is_streamed:
        return StreamedAnswer(run, answer_format.events(), media_type)
    return await respond_whole(run, answer_format.whole())


async def respond_whole(run: JobRun, whole: WholeAnswer) -> Response:
    """Run a job and answer its request in one JSON object.

    Raises:
        Exception: as `JobRun.submitted`.
    """

    def take(choice: int, delta: CompletionDelta) -> None:
        run.sent(choice, delta)
        whole.take(choice, delta)

    with naming_fields(**run.job.answer.field_names):
        async with run.submitted(take) as submission:
            await submission.ended.wait()
            submission.check()
    return PacedResponse(whole.pieces(), run.context.turns)


class StreamedAnswer(EventResponse):
    """Runs a job and streams its answer, with an event for each delta.

    An error before the first delta has its own status.

    Deltas wait while the client reads too slowly. One too many ends the stream.
    """

    def __init__(self, run: JobRun, writer: EventWriter, media_type: str = EVENT_STREAM) -> None:
        super().__init__(media_type)
        self._run = run
        self._writer = writer
        self._progress: PromptProgress | None = None  # the last that was written
        self._unread: deque[tuple[int, CompletionDelta]] = deque()  # key: choice
        self._max_unread = most_unread(
            run.job.params, run.job.num_choices, run.context.max_unread_tokens
        )

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """Raises as `JobRun.submitted`, if nothing was sent yet."""
        self._outlet = Outlet.of(scope)
        has_begun = False
        names = self._run.job.answer.field_names
        try:
            with naming_fields(**names), self._outlet.watched(self._write_unread):
                async with self._submitted() as (submission, steps):
                    if steps is not None:
                        has_begun = await self._report_prompt(submission, steps, send)
                    await submission.begun.wait()
                    submission.check()
                    if not has_begun:
                        await self.begin(send)
                        has_begun = True
                    await self._write_all(submission)
            end = self._writer.end()
        except Exception as error:
            if not has_begun and self._progress is None:
                raise
            end = self._writer.failed(_as_api_error(error))
        await send_paced(send, end, self._run.context.turns)

    @asynccontextmanager
    async def _submitted(
        self,
    ) -> AsyncGenerator[tuple[Submission, Subscription[StepRecord] | None]]:
        """Submit the job; yield the engine's steps, too, if it reports progress."""
        if not self._run.job.answer.reports_progress:
            async with self._run.submitted(self._take) as submission:
                yield submission, None
            return
        with self._run.context.engine.activity.steps.subscribe() as steps:
            async with self._run.submitted(self._take) as submission:
                yield submission, steps

    async def _report_prompt(
        self, submission: Submission, steps: Subscription[StepRecord], send: Send
    ) -> bool:
        """Write the first completion's progress until its first token; return if any was."""
        begun = asyncio.create_task(submission.begun.wait())
        begun.add_done_callback(lambda _: steps.close())
        first_s, num_cached = 0.0, 0
        try:
            while records := await steps.take():
                for record, chunk in _chunks_of(submission.request_ids[:1], records):
                    if not first_s:
                        first_s, num_cached = record.started_s, chunk.start
                        await self.begin(send)
                    if submission.begun.is_set():
                        return True
                    self._progress = PromptProgress(
                        len(self._run.job.prompts[0].token_ids),
                        num_cached,
                        chunk.start + chunk.num_tokens,
                        1e3 * (record.ended_s - first_s),
                    )
                    self._write_progress()
        finally:
            begun.cancel()
        return first_s > 0

    def _write_progress(self) -> None:
        if self._progress is not None and self._outlet.is_writable:
            writer: Any = self._writer  # a `_ChunkWriter`: only its bodies ask for progress
            self._outlet.write(writer.progress(self._progress))

    def _take(self, choice: int, delta: CompletionDelta) -> None:
        if self._outlet.is_writable and not self._unread:
            self._write(choice, delta)
            return
        if len(self._unread) == self._max_unread:
            self._unread.clear()
            raise SlowReaderError(
                f"the stream was ended: {self._max_unread} of its tokens waited to be read"
            )
        self._unread.append((choice, delta))

    async def _write_all(self, submission: Submission) -> None:
        """Return once all deltas are written; raises the submission's error, if any."""
        self._write_unread()
        await submission.ended.wait()
        while self._unread:
            await self._outlet.caught_up()
            self._write_unread()
        submission.check()

    def _write_unread(self) -> None:
        while self._unread and self._outlet.is_writable:
            self._write(*self._unread.popleft())

    def _write(self, choice: int, delta: CompletionDelta) -> None:
        self._outlet.write(self._writer.delta(choice, delta))
        self._run.sent(choice, delta)


def _chunks_of(
    request_ids: Sequence[str], records: Iterable[StepRecord]
) -> Iterator[tuple[StepRecord, ChunkRecord]]:
    for record in records:
        for chunk in record.chunks:
            if chunk.request_id in request_ids:
                yield record, chunk


def most_unread(params: SamplingParams, num_choices: int, max_unread_tokens: int) -> int:
    """The number of deltas that may wait for one stream's client."""
    num_shown = params.num_shown_logprobs
    num_scores = 0 if num_shown is None else 1 + num_shown
    most_held = MAX_UNREAD_BYTES // (_DELTA_BYTES + _SCORE_BYTES * num_scores)
    return min(num_choices * max_unread_tokens, max(num_choices, most_held))


def _as_api_error(error: Exception) -> ApiError:
    api_error = as_api_error(error)
    if api_error.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.error("a stream failed", exc_info=error)
    return api_error
