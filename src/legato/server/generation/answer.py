"""Turns the deltas of a job into its HTTP answer: one JSON object, or a stream."""

from fastapi.responses import Response

from legato.engine.frontend.completion import CompletionDelta
from legato.server.context import Context
from legato.server.generation.answer_format import AnswerFormat, WholeAnswer
from legato.server.generation.answer_recorder import AnswerRecorder
from legato.server.generation.job import Job
from legato.server.generation.run import running
from legato.server.generation.streamed import StreamedAnswer
from legato.server.http.errors import naming_fields
from legato.server.http.paced import PacedResponse


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
