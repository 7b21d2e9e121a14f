"""Records one answer for the tracer."""

import asyncio
import time
from collections import defaultdict

from legato.api.job import Job
from legato.core.outputs import FinishReason
from legato.core.step_record import AnswerRecord, Record
from legato.language.completion import CompletionDelta
from legato.observe.traces.feed import RecordFeed


class AnswerRecorder:
    """Records one answer, if the record feed has a subscriber, and publishes it at the end."""

    def __init__(self, feed: RecordFeed[Record], job: Job) -> None:
        self._feed = feed
        self._job = job
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
        """Record that a delta was written to the client, or added to a whole answer."""
        if self._feed.is_wanted:
            self._sent_s[choice] += [time.monotonic()] * len(delta.token_ids)

    def end(self, error: BaseException | None) -> None:
        """Publish the record. `error` is what ended the answer early, if anything did."""
        if not self._feed.is_wanted:
            return
        if isinstance(error, asyncio.CancelledError):
            error = ConnectionAbortedError("the client went away")
        job, params = self._job, self._job.params
        record = AnswerRecord(
            http_id=job.arrival.request_id,
            answer_id=job.arrival.answer_id,
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
            max_tokens=None if job.pooling is not None else params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            trace_context=job.arrival.trace_context,
        )
        self._feed.publish([record])
