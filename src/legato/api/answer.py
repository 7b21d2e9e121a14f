"""Turns the deltas of a job into its HTTP answer: one JSON object, or a stream."""

import logging
from collections import deque
from collections.abc import Iterable
from http import HTTPStatus
from typing import Protocol

import msgspec
from fastapi.responses import Response
from msgspec import UNSET, UnsetType
from starlette.types import Receive, Scope, Send

from legato.api.arrival import Arrival
from legato.api.http.bodies import EventResponse
from legato.api.http.errors import ApiError, as_api_error
from legato.api.http.outlet import Outlet, PacedResponse, send_paced
from legato.api.limits import MAX_UNREAD_BYTES
from legato.api.submit import JobRun
from legato.core.errors import naming_fields
from legato.core.sampling_params import SamplingParams
from legato.core.version import __version__
from legato.engine.client.submissions import Submission
from legato.engine.errors import SlowReaderError
from legato.language.completion import CompletionDelta

FINGERPRINT = f"legato-{__version__}"
"""OpenAI's `system_fingerprint`: with the same one and the same seed, outputs are alike."""
_DELTA_BYTES, _SCORE_BYTES = 700, 120
"""Memory of one waiting delta, and of each log probability in it."""

logger = logging.getLogger(__name__)


class LegatoNotes(msgspec.Struct, frozen=True):
    """Attributes: `warnings`: the fields and tools of the request that had no effect."""

    warnings: list[str]


class NotedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes: `legato` is present if there are warnings."""

    legato: LegatoNotes | UnsetType = UNSET


def notes_of(arrival: Arrival) -> LegatoNotes | UnsetType:
    """Return the `legato` of a request's answer, if there are warnings."""
    return LegatoNotes(arrival.warnings) if arrival.warnings else UNSET


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """OpenAI's usage object."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class UsageCounter:
    """Counts the tokens of one request. Each prompt counts once, for any `n`."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_cached_tokens: dict[int, int] = {}  # key: index of a prompt's first choice
        self._num_output_tokens = 0

    def add(self, choice: int, delta: CompletionDelta) -> None:
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
        )


class WholeAnswer(Protocol):
    """An answer in one JSON object."""

    def take(self, choice: int, delta: CompletionDelta) -> object:
        """Add a delta."""

    def pieces(self) -> Iterable[bytes]:
        """Return the answer's JSON after the last delta; each piece is made when it is read."""


class EventWriter(Protocol):
    """Formats an answer as server-sent events."""

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


async def respond(run: JobRun, answer_format: AnswerFormat) -> Response:
    """Run a job and answer its request, streamed or whole.

    Raises:
        Exception: as `JobRun.submitted`, if the answer is not streamed.
    """
    if run.job.answer.is_streamed:
        return StreamedAnswer(run, answer_format.events())
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

    def __init__(self, run: JobRun, writer: EventWriter) -> None:
        super().__init__()
        self._run = run
        self._writer = writer
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
                async with self._run.submitted(self._take) as submission:
                    await submission.begun.wait()
                    submission.check()
                    await self.begin(send)
                    has_begun = True
                    await self._write_all(submission)
            end = self._writer.end()
        except Exception as error:
            if not has_begun:
                raise
            end = self._writer.failed(_as_api_error(error))
        await send_paced(send, end, self._run.context.turns)

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
