"""Runs a job on the engine, and measures and records it."""

import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager

import msgspec

from legato.api.arrival import Arrival
from legato.api.context import ApiContext
from legato.api.http.errors import shutting_down
from legato.api.job import Job, JobPrompt
from legato.core.errors import InvalidRequestError
from legato.core.kv_transfer import KVTransfer
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AddRequest
from legato.core.step_record import AnswerRecord
from legato.engine.client.kv_tickets import KVTransferParams
from legato.engine.client.requests import build_requests
from legato.engine.client.submissions import Submission
from legato.engine.errors import EngineDeadError, OverloadedError
from legato.language.completion import CompletionDelta, CompletionStream
from legato.observe.metrics.request_metrics import INVALID
from legato.observe.metrics.request_recorder import JobRecorder

TakeChoice = Callable[[int, CompletionDelta], object]
"""Called with the index of a completion within the job and its delta; may raise as `Take` may."""


class JobRun:
    """One run of a job.

    Attributes:
        job: without its terms.
        ticket: for the engine that continues the prompt; None if there is none.

    Raises:
        InvalidRequestError: the body names another tenant than the API key, or a transfer of blocks
            that this engine cannot make.
    """

    def __init__(self, context: ApiContext, job: Job, arrival: Arrival) -> None:
        self.context = context
        # A run may last for long, and be kept after its end; the answer has read the terms already.
        self.job = msgspec.structs.replace(job, terms=b"")
        self.arrival = arrival
        self._service = job.service.of_key(arrival.tenant, arrival.cache_owner)
        self._kv_transfer: KVTransfer | None = None
        self.ticket: KVTransferParams | None = None
        if job.kv_transfer_params is not None:
            tickets = context.engine.tickets
            self._kv_transfer = tickets.transfer(job.kv_transfer_params)
            self.ticket = tickets.answer_params(self._kv_transfer)
        self._streams: list[CompletionStream] = []  # of each choice
        self._record = _AnswerRecorder(self)

    def sent(self, choice: int, delta: CompletionDelta) -> None:
        """Record that a delta was written to the client, or added to a whole answer."""
        self._record.sent(choice, delta)

    @asynccontextmanager
    async def submitted(self, take: TakeChoice) -> AsyncGenerator[Submission]:
        """Run all completions, once; leaving the block aborts the rest.

        Args:
            take: called with each delta as it comes.

        Raises:
            ApiError: the engine is gone because the server is shutting down.
            Exception: as `build_requests` and `Engine.submitted`, and what the block raises.
        """
        measured, context = self._measured(), self.context
        reason = FinishReason.ABORT

        def take_output(choice: int, output: RequestOutput, received_s: float) -> bool:
            stream = self._streams[choice]
            delta = stream.push(output, received_s)
            measured.take(
                choice,
                output,
                num_tokens=len(delta.token_ids),
                finish_reason=delta.finish_reason,
                received_s=received_s,
            )
            if output.is_thinking_cut:
                self.arrival.cut_choices.add(choice)
            self._record.take(choice, delta)
            take(choice, delta)
            return not stream.needs_abort

        try:
            async with context.engine.submitted(self._requests(), take_output) as submission:
                yield submission
        except (InvalidRequestError, OverloadedError) as error:
            why = error.reason if isinstance(error, OverloadedError) else INVALID
            measured.refuse(why, time.monotonic())
            raise
        except Exception as error:
            reason = FinishReason.ERROR
            is_stopped = context.lifecycle.is_draining and not context.engine.is_alive
            if isinstance(error, EngineDeadError) and is_stopped:
                raise shutting_down() from error
            raise
        finally:
            self._record.end(sys.exception())
            measured.end(reason, time.monotonic())

    def _requests(self) -> Iterator[AddRequest]:
        for prompt in self.job.prompts:
            for index, request in enumerate(self._requests_of(prompt)):
                self._streams.append(
                    CompletionStream(index, request, self.context.engine.vocabulary)
                )
                yield request

    def _requests_of(self, prompt: JobPrompt) -> list[AddRequest]:
        engine, arrived_s = self.context.engine, self.arrival.received_s
        return build_requests(
            prompt.token_ids,
            self.job.params,
            service=self._service,
            request_id=f"{next(self.context.prompt_numbers)}-{self.arrival.request_id}",
            info=engine.info,
            eos_token_ids=engine.defaults.eos_token_ids,
            arrival_time_s=arrived_s,
            reading_s=time.monotonic() - arrived_s,
            kv_transfer=self._kv_transfer,
            pooling=self.job.pooling,
        )

    def _measured(self) -> JobRecorder:
        return JobRecorder(
            self.context.metrics,
            prompt_lens=[len(prompt.token_ids) for prompt in self.job.prompts],
            n=self.job.params.n,
            max_tokens=self.job.max_tokens,
            slo_class=self._service.slo_class,
            tenant=self._service.tenant,
            arrival_s=self.arrival.received_s,
        )


class _AnswerRecorder:
    """Records one answer, if the record feed has a subscriber, and publishes it at the end."""

    def __init__(self, run: JobRun) -> None:
        self._feed = run.context.engine.activity.records
        self._job = run.job
        self._arrival = run.arrival
        self._request_ids: dict[int, str] = {}
        self._sent_s: defaultdict[int, list[float]] = defaultdict(list)
        self._finish_reasons: dict[int, FinishReason] = {}
        self._num_output_tokens = 0

    def take(self, choice: int, delta: CompletionDelta) -> None:
        """Record a delta from the engine."""
        if not self._feed.is_wanted:
            return
        self._request_ids[choice] = delta.output.request_id
        self._num_output_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._finish_reasons[choice] = delta.finish_reason

    def sent(self, choice: int, delta: CompletionDelta) -> None:
        if self._feed.is_wanted:
            self._sent_s[choice] += [time.monotonic()] * len(delta.token_ids)

    def end(self, error: BaseException | None) -> None:
        """Publish the record. `error` is what ended the answer early, if anything did."""
        if not self._feed.is_wanted:
            return
        if isinstance(error, asyncio.CancelledError):
            error = ConnectionAbortedError("the client went away")
        job, arrival = self._job, self._arrival
        record = AnswerRecord(
            http_id=arrival.request_id,
            answer_id=arrival.answer_id,
            operation=job.operation,
            is_streamed=job.answer.is_streamed,
            request_ids=self._request_ids,
            received_s=arrival.received_s,
            ended_s=time.monotonic(),
            sent_s=dict(self._sent_s),
            finish_reasons=self._finish_reasons,
            error=None if error is None else str(error),
            error_type=None if error is None else type(error).__name__,
            num_prompt_tokens=job.num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            n=job.params.n,
            max_tokens=job.max_tokens,
            temperature=job.params.temperature,
            top_p=job.params.top_p,
            trace_context=arrival.trace_context,
        )
        self._feed.publish([record])
