"""Runs the prompts of one HTTP request, merges what comes of them, and notes how that went."""

import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from legato.core.errors import InvalidRequestError
from legato.core.outputs import FinishReason
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.step_record import AnswerRecord
from legato.core.token_ids import TokenIds
from legato.engine.errors import EngineDeadError, OverloadedError
from legato.engine.frontend.completion import CompletionDelta
from legato.observe.metrics.request_metrics import INVALID
from legato.observe.metrics.request_recorder import JobRecorder
from legato.observe.traces.feed import RecordFeed
from legato.server.context import Arrival, Context
from legato.server.http.errors import shutting_down
from legato.server.requests.outcome import Generation

PromptDelta = tuple[int, CompletionDelta]  # index of the prompt, and what is new


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts to complete, `params.n` times each.

    Attributes:
        operation, is_streamed: as in `AnswerRecord`.
        prompts: token ids of each.
    """

    arrival: Arrival
    operation: str
    is_streamed: bool
    prompts: list[TokenIds]
    params: SamplingParams
    service: ServiceParams

    @classmethod
    def of(
        cls, asked: Generation, prompts: list[TokenIds], *, arrival: Arrival, operation: str
    ) -> "Job":
        """What was read of a body.

        Raises:
            InvalidRequestError: it claims another tenant than its key's.
        """
        return cls(
            arrival=arrival,
            operation=operation,
            is_streamed=asked.is_streamed,
            prompts=prompts,
            params=asked.params,
            service=asked.service.of_key(arrival.tenant),
        )

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
    recorder = _recorder(context, job)
    answer = _AnswerRecorder(context.client.records, job)
    reason = FinishReason.ABORT
    try:
        async with aclosing(_deltas(context, job)) as deltas:
            async for prompt_index, delta in deltas:
                choice = job.choice(prompt_index, delta)
                recorder.take(
                    choice,
                    delta.output,
                    num_tokens=len(delta.token_ids),
                    finish_reason=delta.finish_reason,
                    received_s=delta.received_s,
                )
                answer.take(choice, delta)
                yield prompt_index, delta
                answer.sent(choice, delta)
    except (InvalidRequestError, OverloadedError) as error:
        why = error.reason if isinstance(error, OverloadedError) else INVALID
        recorder.refuse(why, time.monotonic())
        raise
    except Exception as error:
        reason = FinishReason.ERROR
        is_stopped = context.lifecycle.is_draining and not context.client.is_alive
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
        max_tokens=job.params.max_tokens,
        slo_class=job.service.slo_class,
        tenant=job.service.tenant,
        arrival_s=job.arrival.received_s,
    )


class _AnswerRecorder:
    """Notes how an answer went, while somebody listens to records; publishes that at its end."""

    def __init__(self, feed: RecordFeed, job: Job) -> None:
        self._feed = feed
        self._job = job
        self._request_ids: dict[int, str] = {}
        self._sent_s: defaultdict[int, list[float]] = defaultdict(list)
        self._finish_reasons: dict[int, FinishReason] = {}
        self._num_output_tokens = 0

    def take(self, choice: int, delta: CompletionDelta) -> None:
        """A delta has come."""
        if not self._feed.is_wanted:
            return
        self._request_ids[choice] = delta.output.request_id
        self._num_output_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._finish_reasons[choice] = delta.finish_reason

    def sent(self, choice: int, delta: CompletionDelta) -> None:
        """It has been written to the client's socket, or put with the others of its answer."""
        if self._feed.is_wanted:
            self._sent_s[choice] += [time.monotonic()] * len(delta.token_ids)

    def end(self, error: BaseException | None) -> None:
        """The answer is over; `error` is why, where it did not come to its end."""
        if not self._feed.is_wanted:
            return
        if isinstance(error, GeneratorExit | asyncio.CancelledError):
            error = ConnectionAbortedError("the client went away")
        job, params = self._job, self._job.params
        record = AnswerRecord(
            http_id=job.arrival.request_id,
            operation=job.operation,
            is_streamed=job.is_streamed,
            request_ids=self._request_ids,
            received_s=job.arrival.received_s,
            ended_s=time.monotonic(),
            sent_s=dict(self._sent_s),
            finish_reasons=self._finish_reasons,
            error=None if error is None else str(error),
            error_type=None if error is None else type(error).__name__,
            num_prompt_tokens=sum(map(len, job.prompts)),
            num_output_tokens=self._num_output_tokens,
            n=params.n,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            trace_context=job.arrival.trace_context,
        )
        self._feed.publish([record])


def _deltas(context: Context, job: Job) -> AsyncGenerator[PromptDelta, None]:
    streams = [
        _of_prompt(context, job, prompt_index, prompt)
        for prompt_index, prompt in enumerate(job.prompts)
    ]
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _of_prompt(
    context: Context, job: Job, prompt_index: int, prompt: TokenIds
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
    """Everything that the streams yield, in the order it comes; the first error ends them all.

    They begin one after the other, with a turn of the event loop for everybody else in between.
    """
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

    pumps: list[asyncio.Task[None]] = []

    async def begin() -> None:
        for stream in streams:
            pumps.append(asyncio.create_task(pump(stream)))
            await asyncio.sleep(0)

    beginning = asyncio.create_task(begin())
    num_open = len(streams)
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
        beginning.cancel()
        for task in pumps:
            task.cancel()
        await asyncio.gather(beginning, *pumps, return_exceptions=True)
