"""Exports an OpenTelemetry span for each HTTP request, over OTLP/HTTP.

Names follow the semantic conventions for generative AI, or else vLLM's; neither has names for
drafts.
"""

import asyncio
import importlib.util
import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from legato.core.errors import ConfigError
from legato.core.outputs import FinishReason
from legato.core.step_record import (
    AnswerRecord,
    BlocksFetched,
    GrammarReady,
    Operation,
    Record,
    RequestArrived,
    RequestEnded,
    StepRecord,
)
from legato.core.version import __version__, install_command
from legato.observe.traces.feed import RecordFeed

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)

_GATHER_S = 0.1
_EXPORT_EVERY_MS = 1000
_MAX_ENDED = 4096
"""Ended requests kept until their answers' records come."""


def check_spans_can_be_made() -> None:
    """Raise `ConfigError` if the packages for spans are not installed."""
    for package in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        try:
            is_missing = importlib.util.find_spec(package) is None
        except ModuleNotFoundError:
            is_missing = True
        if is_missing:
            raise ConfigError(f"OpenTelemetry missing: {install_command('otel')}")


class Progress:
    """How far a request has come in the engine; times are None until known."""

    def __init__(self, arrived_s: float) -> None:
        self.arrived_s = arrived_s
        self.grammar_s: float | None = None
        self.fetched_s: float | None = None
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.preempted_s: list[float] = []
        self.ended_s = math.inf
        self.num_cached_tokens = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0


class Progresses:
    """The progress of requests whose answers have not ended."""

    def __init__(self) -> None:
        self._progress: dict[str, Progress] = {}  # key request id
        self._ended: deque[str] = deque()

    def note(self, record: Record) -> None:
        match record:
            case RequestArrived():
                self._progress.setdefault(record.request_id, Progress(record.arrived_s))
            case GrammarReady():
                if record.request_id in self._progress:
                    self._progress[record.request_id].grammar_s = record.ready_s
            case BlocksFetched():
                if record.request_id in self._progress:
                    self._progress[record.request_id].fetched_s = record.ended_s
            case StepRecord():
                self._note_step(record)
            case RequestEnded():
                self._note_end(record)

    def take(self, answer: AnswerRecord) -> dict[int, Progress]:
        """Return the progress of the answer's completions, and forget it; key the choice."""
        return {
            choice: self._progress.pop(request_id)
            for choice, request_id in answer.request_ids.items()
            if request_id in self._progress
        }

    def _note_step(self, step: StepRecord) -> None:
        for request_id in step.preempted:
            if request_id in self._progress:
                self._progress[request_id].preempted_s.append(step.planned_s)
        for request_id, num_cached_tokens in step.admitted.items():
            progress = self._progress.get(request_id)
            if progress is not None and progress.admitted_s is None:
                progress.admitted_s = step.planned_s
                progress.num_cached_tokens = num_cached_tokens
        for chunk in step.chunks:
            progress = self._progress.get(chunk.request_id)
            # A step in flight at a request's end may still hold it; its tokens do not count.
            if progress is not None and chunk.num_samples and step.ended_s <= progress.ended_s:
                progress.last_token_s = step.ended_s
                progress.num_draft_tokens += chunk.num_drafts
                progress.num_accepted_tokens += chunk.num_accepted
                if progress.first_token_s is None:
                    progress.first_token_s = step.ended_s

    def _note_end(self, ended: RequestEnded) -> None:
        if ended.finish_reason is FinishReason.REFUSED:
            self._progress.pop(ended.request_id, None)
        elif ended.request_id in self._progress:
            progress = self._progress[ended.request_id]
            progress.ended_s = ended.ended_s
            if ended.finish_reason is FinishReason.STOP and not ended.num_output_tokens:
                # A vector came in place of tokens.
                progress.first_token_s = progress.last_token_s = ended.ended_s
            self._ended.append(ended.request_id)
        while len(self._ended) > _MAX_ENDED:
            self._progress.pop(self._ended.popleft(), None)


Attributes = dict[str, str | int | float | list[str]]

_OPERATIONS: dict[Operation, tuple[str, str]] = {
    "chat": ("chat", "chatcmpl-"),
    "messages": ("chat", "msg_"),
    "responses": ("chat", "resp_"),
    "text_completion": ("text_completion", "cmpl-"),
    "generate": ("text_completion", "generate-tokens-"),
    "embeddings": ("embeddings", "embd-"),
    "score": ("score", "score-"),
    "rerank": ("rerank", "rerank-"),
}
"""Value: the operation's OpenTelemetry name, which conversations share, and the prefix of the
answer's id."""


def span_attributes(
    answer: AnswerRecord, progress: Mapping[int, Progress], model_name: str
) -> Attributes:
    """Return a span's attributes; latencies are in seconds, of the earliest completion.

    Args:
        progress: of the completions; key the choice.
    """
    reasons = [answer.finish_reasons[choice] for choice in sorted(answer.finish_reasons)]
    operation, prefix = _OPERATIONS[answer.operation]
    attributes: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "legato",
        "gen_ai.request.id": answer.http_id,
        "gen_ai.request.model": model_name,
        "gen_ai.response.id": prefix + answer.answer_id,
        "gen_ai.response.model": model_name,
        "gen_ai.usage.input_tokens": answer.num_prompt_tokens,
        "gen_ai.usage.output_tokens": answer.num_output_tokens,
        "gen_ai.usage.prompt_tokens": answer.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": answer.num_output_tokens,
        "gen_ai.usage.num_sequences": len(answer.request_ids),
        "gen_ai.latency.e2e": answer.ended_s - answer.received_s,
    }
    if operation in ("chat", "text_completion"):  # the others answer with vectors or scores
        attributes |= {
            "gen_ai.output.type": "text",
            "gen_ai.request.n": answer.n,
            "gen_ai.request.choice.count": answer.n,
            "gen_ai.request.temperature": answer.temperature,
            "gen_ai.request.top_p": answer.top_p,
            "gen_ai.response.finish_reasons": [str(reason) for reason in reasons],
        }
        if answer.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = answer.max_tokens
    if answer.error_type is not None:
        attributes["error.type"] = answer.error_type
    found = list(progress.values())
    return attributes | _drafts(found) | _latencies(answer, found) | _cached(answer, progress)


def _cached(answer: AnswerRecord, progress: Mapping[int, Progress]) -> Attributes:
    """Return the cached tokens of all prompts; each counts once, as in the answer's usage."""
    admitted = [
        one.num_cached_tokens
        for choice, one in progress.items()
        if choice % answer.n == 0 and one.admitted_s is not None
    ]
    return {"gen_ai.usage.cache_read.input_tokens": sum(admitted)} if admitted else {}


def _drafts(progress: list[Progress]) -> Attributes:
    num_drafts = sum(p.num_draft_tokens for p in progress)
    if not num_drafts:
        return {}
    return {
        "legato.usage.draft_tokens": num_drafts,
        "legato.usage.accepted_draft_tokens": sum(p.num_accepted_tokens for p in progress),
    }


def _latencies(answer: AnswerRecord, progress: list[Progress]) -> Attributes:
    admitted_s = min((p.admitted_s for p in progress if p.admitted_s is not None), default=None)
    first_s = min((p.first_token_s for p in progress if p.first_token_s is not None), default=None)
    last_s = max((p.last_token_s for p in progress if p.last_token_s is not None), default=None)
    if admitted_s is None or first_s is None or last_s is None:
        return {}
    told_s = min((sent_s[0] for sent_s in answer.sent_s.values() if sent_s), default=first_s)
    return {
        "gen_ai.latency.time_in_queue": admitted_s - min(p.arrived_s for p in progress),
        "gen_ai.latency.time_to_first_token": told_s - answer.received_s,
        "gen_ai.latency.time_in_model_prefill": first_s - admitted_s,
        "gen_ai.latency.time_in_model_decode": last_s - first_s,
        "gen_ai.latency.time_in_model_inference": last_s - admitted_s,
    }


def span_events(progress: list[Progress]) -> Iterator[tuple[str, float]]:
    """Yield names and times of a request's events."""
    for completion in progress:
        if completion.grammar_s is not None:
            yield "grammar ready", completion.grammar_s
        if completion.fetched_s is not None:
            yield "blocks fetched", completion.fetched_s
        if completion.admitted_s is not None:
            yield "first scheduled", completion.admitted_s
        for preempted_s in completion.preempted_s:
            yield "preempted", preempted_s
        if completion.first_token_s is not None:
            yield "first token", completion.first_token_s


class SpanExport:
    """Makes spans from a feed's records and exports them in the background, until `stop`.

    A slow or lost collector loses spans; the server does not wait for it.

    Args:
        exporter: None exports to `endpoint`, which is a complete URL.
    """

    def __init__(
        self,
        feed: RecordFeed[Record],
        model_name: str,
        endpoint: str,
        exporter: "SpanExporter | None" = None,
    ) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._model_name = model_name
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "legato", "service.version": __version__})
        )
        exporter = exporter or OTLPSpanExporter(endpoint=endpoint)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, schedule_delay_millis=_EXPORT_EVERY_MS)
        )
        self._tracer = self._provider.get_tracer("legato", __version__)
        self._progresses = Progresses()
        self._unix_s = time.time() - time.monotonic()
        self._subscription = feed.subscribe()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Export all spans made so far, and end."""
        self._subscription.close()
        await self._task
        await asyncio.to_thread(self._provider.shutdown)

    async def _run(self) -> None:
        while records := await self._subscription.take():
            for record in records:
                self._progresses.note(record)
                if isinstance(record, AnswerRecord):
                    try:
                        self._export(record)
                    except Exception:  # it costs this span, not all later ones
                        logger.exception("the answer %s has no span", record.answer_id)
            await self._subscription.gather(_GATHER_S)

    def _export(self, answer: AnswerRecord) -> None:
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        progress = self._progresses.take(answer)
        attributes = span_attributes(answer, progress, self._model_name)
        span = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {self._model_name}",
            context=TraceContextTextMapPropagator().extract(answer.trace_context),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=self._unix_ns(answer.received_s),
        )
        for name, time_s in span_events(list(progress.values())):
            span.add_event(name, timestamp=self._unix_ns(time_s))
        if answer.error is not None:
            span.set_status(StatusCode.ERROR, answer.error)
        span.end(self._unix_ns(answer.ended_s))

    def _unix_ns(self, time_s: float) -> int:
        return int(1e9 * (time_s + self._unix_s))
