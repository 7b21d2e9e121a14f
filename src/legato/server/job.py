"""Runs the prompts of one HTTP request and merges what comes of them."""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from legato.core.errors import InvalidRequestError
from legato.core.outputs import FinishReason
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.engine.completion import CompletionDelta
from legato.engine.errors import EngineDeadError, OverloadedError
from legato.observe.metrics import RequestRecorder
from legato.server.answer_recorder import AnswerRecorder
from legato.server.context import Arrival, Context
from legato.server.errors import shutting_down

PromptDelta = tuple[int, CompletionDelta]  # index of the prompt, and what is new


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts to complete, `params.n` times each.

    Attributes:
        operation, is_streamed: as in `AnswerRecord`.
        prompts: token ids of each.
        arrival_s: when the HTTP request came, on the clock of `time.perf_counter`.
    """

    arrival: Arrival
    operation: str
    is_streamed: bool
    prompts: list[list[int]]
    params: SamplingParams
    service: ServiceParams
    arrival_s: float

    def choice(self, prompt_index: int, delta: CompletionDelta) -> int:
        """Index of the delta's completion among all completions of all prompts."""
        return prompt_index * self.params.n + delta.index

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n


async def run_job(context: Context, job: Job) -> AsyncGenerator[PromptDelta, None]:
    """Stream the deltas of all completions and measure them; closing it aborts what still runs.

    Raises:
        InvalidRequestError: a prompt can never be served as asked.
        OverloadedError: too many requests are waiting, or the TTFT SLO cannot be met.
        RequestFailedError: one of the prompts cannot be computed. The others are aborted.
        SlowReaderError: the deltas were not taken for so long that all were aborted.
        EngineDeadError: the engine process died under it, or is not running.
        ApiError: the same, where the server is shutting down.
    """
    running = _recorders(context, job)
    answer = AnswerRecorder(context.client.records, job)
    reason = FinishReason.ABORT
    try:
        async with aclosing(_deltas(context, job)) as deltas:
            async for prompt_index, delta in deltas:
                choice = job.choice(prompt_index, delta)
                _record(running, choice, delta)
                answer.sending(choice, delta)
                yield prompt_index, delta
    except (InvalidRequestError, OverloadedError):
        reason = FinishReason.REFUSED
        raise
    except Exception as error:
        reason = FinishReason.ERROR
        is_stopped = context.lifecycle.is_draining and not context.client.is_alive
        if isinstance(error, EngineDeadError) and is_stopped:
            raise shutting_down() from error
        raise
    finally:
        answer.end(sys.exception())
        for recorder in running.values():
            recorder.end(reason, time.perf_counter())


def _recorders(context: Context, job: Job) -> dict[int, RequestRecorder]:
    """One a completion; key its choice index."""
    return {
        choice: RequestRecorder(
            context.metrics,
            num_prompt_tokens=len(job.prompts[choice // job.params.n]),
            arrival_s=job.arrival_s,
        )
        for choice in range(job.num_choices)
    }


def _record(running: dict[int, RequestRecorder], choice: int, delta: CompletionDelta) -> None:
    now_s = time.perf_counter()
    if delta.token_ids:
        running[choice].add_tokens(len(delta.token_ids), now_s)
    if delta.finish_reason is not None:
        running.pop(choice).end(delta.finish_reason, now_s)


def _deltas(context: Context, job: Job) -> AsyncGenerator[PromptDelta, None]:
    streams = [
        _of_prompt(context, job, prompt_index, prompt)
        for prompt_index, prompt in enumerate(job.prompts)
    ]
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _of_prompt(
    context: Context, job: Job, prompt_index: int, prompt: list[int]
) -> AsyncGenerator[PromptDelta, None]:
    stream = context.client.generate(
        prompt, job.params, service=job.service, request_id=job.arrival.request_id
    )
    async with aclosing(stream) as deltas:
        async for delta in deltas:
            yield prompt_index, delta


async def _merged(
    streams: list[AsyncGenerator[PromptDelta, None]],
) -> AsyncGenerator[PromptDelta, None]:
    """Everything that the streams yield, in the order it comes; the first error ends them all."""
    # Bounded, so that where nobody reads, the streams' own limits are what they run into.
    arrived: asyncio.Queue[PromptDelta | Exception | None] = asyncio.Queue(len(streams))

    async def pump(stream: AsyncGenerator[PromptDelta, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await arrived.put(item)
            await arrived.put(None)
        except Exception as error:
            await arrived.put(error)

    pumps = [asyncio.create_task(pump(stream)) for stream in streams]
    num_open = len(pumps)
    try:
        while num_open:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
