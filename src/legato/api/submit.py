"""Runs a job and measures it."""

import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from legato.api.answer_recorder import AnswerRecorder
from legato.api.context import Context
from legato.api.http.errors import shutting_down
from legato.api.job import Job
from legato.core.errors import InvalidRequestError
from legato.core.outputs import FinishReason
from legato.engine.client.submission import Prompts, Submission
from legato.engine.errors import EngineDeadError, OverloadedError
from legato.language.completion import CompletionDelta
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

    def take_measured(prompt_index: int, delta: CompletionDelta) -> None:
        choice = prompt_index * job.params.n + delta.index
        recorder.take(
            choice,
            delta.output,
            num_tokens=len(delta.token_ids),
            finish_reason=delta.finish_reason,
            received_s=delta.received_s,
        )
        answer.take(choice, delta)
        take(choice, delta)

    try:
        prompts = Prompts(
            token_ids=job.prompts,
            params=job.params,
            request_id=job.arrival.request_id,
            service=job.service,
            kv_transfer=job.kv_transfer,
            pooling=job.pooling,
            arrived_s=job.arrival.received_s,
        )
        async with context.engine.submitted(prompts, take_measured) as submission:
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
