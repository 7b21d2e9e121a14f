"""Runs a job and measures it."""

import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager

from legato.api.answer_recorder import AnswerRecorder
from legato.api.context import Context
from legato.api.http.errors import shutting_down
from legato.api.job import Job
from legato.core.errors import InvalidRequestError
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AddRequest
from legato.core.token_ids import TokenIds
from legato.engine.client.requests import build_requests
from legato.engine.client.submissions import Submission
from legato.engine.errors import EngineDeadError, OverloadedError
from legato.language.completion import CompletionDelta, CompletionStream
from legato.observe.metrics.request_metrics import INVALID
from legato.observe.metrics.request_recorder import JobRecorder

TakeChoice = Callable[[int, CompletionDelta], object]
"""Called with the index of a completion within the job and its delta; may raise as `Take` may."""


@asynccontextmanager
async def running(
    context: Context, job: Job, answer: AnswerRecorder, take: TakeChoice
) -> AsyncGenerator[Submission]:
    """Run all completions of a job and measure them; leaving the block aborts the rest.

    Args:
        answer: records each delta and the end. The caller records what it sends.
        take: called with each delta as it comes.

    Raises:
        ApiError: the engine is gone because the server is shutting down.
        Exception: as `Engine.submitted`, and what the block raises.
    """
    recorder = _recorder(context, job)
    reason = FinishReason.ABORT

    streams: list[CompletionStream] = []  # of each choice

    def requests() -> Iterator[AddRequest]:
        for prompt in job.prompts:
            for index, request in enumerate(_requests(context, job, prompt)):
                streams.append(CompletionStream(index, request, context.engine.vocabulary))
                yield request

    def take_measured(choice: int, output: RequestOutput, received_s: float) -> bool:
        stream = streams[choice]
        delta = stream.push(output, received_s)
        recorder.take(
            choice,
            output,
            num_tokens=len(delta.token_ids),
            finish_reason=delta.finish_reason,
            received_s=received_s,
        )
        answer.take(choice, delta)
        take(choice, delta)
        return not stream.needs_abort

    try:
        async with context.engine.submitted(requests(), take_measured) as submission:
            yield submission
    except (InvalidRequestError, OverloadedError) as error:
        why = error.reason if isinstance(error, OverloadedError) else INVALID
        recorder.refuse(why, time.monotonic())
        raise
    except Exception as error:
        reason = FinishReason.ERROR
        is_stopped = context.lifecycle.is_draining and not context.engine.is_alive
        if isinstance(error, EngineDeadError) and is_stopped:
            raise shutting_down() from error
        raise
    finally:
        answer.end(sys.exception())
        recorder.end(reason, time.monotonic())


def _requests(context: Context, job: Job, prompt: TokenIds) -> list[AddRequest]:
    """Return the requests for all completions of a prompt."""
    engine, arrived_s = context.engine, job.arrival.received_s
    return build_requests(
        prompt,
        job.params,
        service=job.service,
        request_id=f"{next(context.prompt_numbers)}-{job.arrival.request_id}",
        info=engine.info,
        eos_token_ids=engine.defaults.eos_token_ids,
        arrival_time_s=arrived_s,
        reading_s=time.monotonic() - arrived_s,
        kv_transfer=job.kv_transfer,
        pooling=job.pooling,
    )


def _recorder(context: Context, job: Job) -> JobRecorder:
    return JobRecorder(
        context.metrics,
        prompt_lens=[len(prompt) for prompt in job.prompts],
        n=job.params.n,
        max_tokens=None if job.pooling is not None else job.params.max_tokens,
        slo_class=job.service.slo_class,
        tenant=job.service.tenant,
        arrival_s=job.arrival.received_s,
    )
