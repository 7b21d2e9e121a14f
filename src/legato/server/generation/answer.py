"""From the deltas of a job to the answer to its HTTP request: one JSON object, or a stream."""

from fastapi.responses import Response

from legato.engine.frontend.completion import Completion, CompletionDelta
from legato.server.context import Context
from legato.server.generation.answer_format import AnswerFormat, UsageCounter, shown
from legato.server.generation.answer_recorder import AnswerRecorder
from legato.server.generation.job import Job
from legato.server.generation.run import running
from legato.server.generation.streamed import EventWriter, StreamedAnswer
from legato.server.http.bodies import json_response
from legato.server.http.errors import naming_fields
from legato.server.requests.outcome import Generation


async def respond(
    context: Context, job: Job, answer_format: AnswerFormat, asked: Generation
) -> Response:
    """Answer as the request asks.

    Raises:
        Exception: as `running`, where the answer is not streamed.
    """
    recorder = AnswerRecorder(context.client.records, job)
    if asked.is_streamed:
        writer = EventWriter(job, answer_format, asked)
        return StreamedAnswer(context, job, recorder, writer)
    whole = _WholeAnswer(job, recorder, asked)
    with naming_fields(**job.field_names):
        async with running(context, job, recorder, whole.take) as submission:
            await submission.ended.wait()
            submission.check()
    return json_response(answer_format.answer(whole.completions, whole.usage.so_far))


class _WholeAnswer:
    """Puts completions together."""

    def __init__(self, job: Job, recorder: AnswerRecorder, asked: Generation) -> None:
        self.completions = [Completion(choice) for choice in range(job.num_choices)]
        self.usage = UsageCounter(job.prompts)
        self._recorder = recorder
        self._asked = asked

    def take(self, choice: int, delta: CompletionDelta) -> None:
        self._recorder.sent(choice, delta)
        delta = shown(delta, self._asked)
        self.usage.add(choice, delta)
        self.completions[choice].add(delta)
