"""Turns the deltas of a job into its HTTP answer: one JSON object, or a stream."""

import logging
from collections import deque
from http import HTTPStatus

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from legato.api.answer_format import AnswerFormat, EventWriter, WholeAnswer
from legato.api.answer_recorder import AnswerRecorder
from legato.api.context import Context
from legato.api.http.bodies import EventResponse
from legato.api.http.errors import ApiError, as_api_error, naming_fields
from legato.api.http.outlet import Outlet
from legato.api.http.paced import PacedResponse, send_paced
from legato.api.job import Job
from legato.api.limits import MAX_UNREAD_BYTES
from legato.api.submit import running
from legato.core.sampling_params import SamplingParams
from legato.engine.client.submissions import Submission
from legato.engine.errors import SlowReaderError
from legato.language.completion import CompletionDelta

_DELTA_BYTES, _SCORE_BYTES = 700, 120
"""Memory of one waiting delta, and of each log probability in it."""

logger = logging.getLogger(__name__)


async def respond(context: Context, job: Job, answer_format: AnswerFormat) -> Response:
    """Run a job and answer its request, streamed or whole.

    Raises:
        Exception: as `running`, if the answer is not streamed.
    """
    recorder = AnswerRecorder(context.engine.activity.records, job)
    if job.is_streamed:
        return StreamedAnswer(context, job, recorder, answer_format.events())
    return await respond_whole(context, job, answer_format.whole(), recorder)


async def respond_whole(
    context: Context, job: Job, whole: WholeAnswer, recorder: AnswerRecorder | None = None
) -> Response:
    """Run a job and answer its request in one JSON object.

    Raises:
        Exception: as `running`.
    """
    recorder = recorder or AnswerRecorder(context.engine.activity.records, job)

    def take(choice: int, delta: CompletionDelta) -> None:
        recorder.sent(choice, delta)
        whole.take(choice, delta)

    with naming_fields(**job.field_names):
        async with running(context, job, recorder, take) as submission:
            await submission.ended.wait()
            submission.check()
    return PacedResponse(whole.pieces(), context.turns)


class StreamedAnswer(EventResponse):
    """Runs a job and streams its answer, with an event for each delta.

    An error before the first delta has its own status.

    Deltas wait while the client reads too slowly. One too many ends the stream.
    """

    def __init__(
        self, context: Context, job: Job, recorder: AnswerRecorder, writer: EventWriter
    ) -> None:
        super().__init__()
        self._context = context
        self._job = job
        self._recorder = recorder
        self._writer = writer
        self._unread: deque[tuple[int, CompletionDelta]] = deque()  # key: choice
        self._max_unread = most_unread(job.params, job.num_choices, context.max_unread_tokens)

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """Raises as `running`, if nothing was sent yet."""
        self._outlet = Outlet.of(scope)
        has_begun = False
        try:
            with naming_fields(**self._job.field_names), self._outlet.watched(self._write_unread):
                async with running(
                    self._context, self._job, self._recorder, self._take
                ) as submission:
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
        await send_paced(send, end, self._context.turns)

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
        self._recorder.sent(choice, delta)


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
